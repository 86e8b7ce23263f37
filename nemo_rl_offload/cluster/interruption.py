"""Ctrl-C at a moment when what runs would not survive it."""

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType


def forget_rays_alarm() -> None:
    """Where SIGTERM meets Ray's C++ part as it starts, that sets an alarm, and would abort the process after 3 s.

    Python hears of the signal later, whichever handler it has by then.
    """
    signal.alarm(0)


@contextlib.contextmanager
def interrupted_afterwards(what: str) -> Iterator[None]:
    """SIGINT and SIGTERM take effect when the block has ended; a second one takes effect at once.

    Outside the main thread, which is where signals arrive, nothing changes.

    Args:
        what: what is waited for, for the user.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []

    def remember(number: int, _frame: FrameType | None) -> None:
        forget_rays_alarm()
        if arrived:
            raise KeyboardInterrupt
        arrived.append(number)
        sys.stderr.write(f"Ending as soon as {what} is done; a second time, at once ...\n")

    numbers = [number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) != signal.SIG_IGN]
    previous = {number: signal.signal(number, remember) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        if arrived:
            signal.raise_signal(arrived[0])
