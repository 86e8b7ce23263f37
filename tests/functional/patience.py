"""How long tests wait for what should happen: until a hang is certain, however busy the machine is."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil

PATIENCE_S = 600.0


class OverdueError(BaseException):
    """No `Exception`: nobody takes it for a fault of what was read."""


@contextmanager
def within_patience() -> Iterator[None]:
    """Raise `OverdueError` in what takes longer than `PATIENCE_S`, once the interpreter is back from a call of C."""

    def fail(*_: object) -> None:
        raise OverdueError(f"this takes more than {PATIENCE_S:.0f} s")

    former = signal.signal(signal.SIGALRM, fail)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)


def eventually(condition: Callable[[], object], *, period_s: float = 0.05) -> bool:
    """Whether `condition` holds at last; looks every `period_s`, for `PATIENCE_S`."""
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > end_s:
            return False
        time.sleep(period_s)
    return True


def is_running(pid: int) -> bool:
    """Whether the process is there, and no zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
