"""Progress of a run: a bar on a terminal, a plain line now and then elsewhere."""

import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn
from rich.progress import Progress as RichProgress
from rich.table import Column

from nemo_rl_offload.units import human_bytes

LINE_EVERY = 10
BAR_WIDTH = 10
GENERATING_EVERY_S = 30.0


class Progress:
    """Shows how far a run of ``total`` steps is, the time left, and the figures of the last step.

    On a terminal that is a bar; elsewhere one line for the first step, every tenth and the last, so that a
    log stays readable. With ``enabled`` false nothing is shown. Writes to standard output unless ``stream``
    is given. A context manager.
    """

    def __init__(self, total: int, enabled: bool, stream: TextIO | None = None) -> None:
        self._total = total
        self._stream = stream or sys.stdout
        self._enabled = enabled
        self._bar: RichProgress | None = None
        self._task = TaskID(0)
        self._description = "starting"
        self._first_step: int | None = None
        self._start_s = self._told_s = time.monotonic()
        if enabled and self._stream.isatty():
            self._bar = RichProgress(
                TextColumn("{task.completed}/{task.total}", table_column=Column(no_wrap=True)),
                BarColumn(bar_width=BAR_WIDTH, table_column=Column(no_wrap=True)),
                TextColumn("{task.description}", table_column=Column(no_wrap=True)),
                console=Console(file=self._stream),
                redirect_stdout=stream is None,
            )
            self._task = self._bar.add_task(self._description, total=total)

    def update(self, step: int, **fields: float | None) -> None:
        """Report that ``step``, counted from one, is done.

        Fields are shown in the order given: ``tokens_per_s`` as a rate, ``*_bytes`` in binary units,
        everything else as a plain number; None is left out. A resumed run starts with a later step, which
        the time left accounts for.
        """
        if self._first_step is None:
            self._first_step = step
        parts = [f"{self._time_left(step)} left", *described(fields)]
        if self._bar is not None:
            room = self._bar.console.width - len(f"{step}/{self._total} ") - BAR_WIDTH - 1
            while len(parts) > 1 and len("  ".join(parts)) > room:
                parts.pop()  # the last say least
            self._description = "  ".join(parts)
            self._bar.update(self._task, completed=step, description=self._description)
        elif self._enabled and (step in (self._first_step, self._total) or step % LINE_EVERY == 0):
            print("  ".join([f"step {step}/{self._total}", *parts]), file=self._stream, flush=True)

    def generating(self, num_done: int, num_responses: int, num_tokens: int, seconds: float) -> None:
        """Report how far a call for responses is that has taken so many seconds.

        Off a terminal that is a line now and then, and none where all responses are there before that.
        """
        now_s = time.monotonic()
        text = f"generating: {num_done} of {num_responses} responses  {num_tokens / max(seconds, 1e-9):,.0f} tokens/s"
        if self._bar is not None:
            self._bar.update(self._task, description=text)
        elif self._enabled and min(now_s - self._told_s, seconds) >= GENERATING_EVERY_S:
            self._told_s = now_s
            print(text, file=self._stream, flush=True)

    def generated(self) -> None:
        """The responses are there: show again what was shown before them."""
        if self._bar is not None:
            self._bar.update(self._task, description=self._description)

    def note(self, text: str) -> None:
        """Show a line between the others."""
        if self._bar is not None:
            self._bar.console.print(text, style="yellow", markup=False, highlight=False, soft_wrap=True)
        elif self._enabled:
            print(text, file=self._stream, flush=True)

    def show(self, text: str) -> None:
        """Show lines of what the run does, between the others."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        elif self._enabled:
            print(text, file=self._stream, flush=True)

    def _time_left(self, step: int) -> str:
        assert self._first_step is not None
        seconds_per_step = (time.monotonic() - self._start_s) / (step - self._first_step + 1)
        minutes, seconds = divmod(round(seconds_per_step * (self._total - step)), 60)
        return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()


def described(fields: Mapping[str, float | None]) -> list[str]:
    """Figures with their names and units, as `Progress.update` shows them."""
    return [_format(name, value) for name, value in fields.items() if value is not None]


def _format(name: str, value: float) -> str:
    if name == "tokens_per_s":
        return f"{value:,.0f} tokens/s"
    if name.endswith("_bytes"):
        return f"{human_bytes(value)} {name.removesuffix('_bytes')}"
    return f"{name} {value:.3g}"
