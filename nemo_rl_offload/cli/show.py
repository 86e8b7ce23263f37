"""How a command shows what it found: to read, or for other programs."""

import json
import os
from collections.abc import Callable
from typing import TextIO

from rich.console import Console, RenderableType


def show(form: str, data: Callable[[], object], readable: Callable[[int], RenderableType]) -> None:
    """Print JSON, or what is made for so many columns."""
    if form == "json":
        print(json.dumps(data(), indent=2))
    else:
        show_readable(readable)


def show_readable(readable: Callable[[int], RenderableType], file: TextIO | None = None) -> None:
    """Print what is made for so many columns.

    Prose is wrapped on a terminal, or where `COLUMNS` says how wide that is. In a file and for another program it stays
    in lines.
    """
    console = Console(file=file, highlight=False, markup=False)
    wraps = console.is_terminal or os.environ.get("COLUMNS", "").isdigit()
    console.print(readable(console.width), soft_wrap=not wraps, crop=False)
