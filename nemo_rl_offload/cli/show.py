"""How a command shows what it found: to read, or for other programs."""

import json
import os
from collections.abc import Callable

from rich.console import Console, RenderableType

from nemo_rl_offload.runs.output import without_nan


def show(form: str, data: Callable[[], object], readable: Callable[[int], RenderableType]) -> None:
    """Print JSON, or what is made for so many columns.

    Prose is wrapped on a terminal, or where `COLUMNS` says how wide that is. In a file and for another program it stays
    in lines.
    """
    if form == "json":
        print(json.dumps(without_nan(data()), indent=2, allow_nan=False, default=str))
        return
    console = Console(highlight=False, markup=False)
    wraps = console.is_terminal or os.environ.get("COLUMNS", "").isdigit()
    console.print(readable(console.width), soft_wrap=not wraps, crop=False)
