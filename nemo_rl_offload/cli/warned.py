"""How the command line shows what Python warns of."""

import contextlib
import warnings
from collections.abc import Iterator

from rich.console import Console


@contextlib.contextmanager
def warnings_as_lines(console: Console) -> Iterator[None]:
    """Show what is warned of as the command line shows its own warnings, without the place in the source."""

    def show(message: Warning | str, *_: object, **_others: object) -> None:
        console.print(f"warning: {message}", style="yellow", markup=False)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield
