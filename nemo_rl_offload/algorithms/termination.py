"""SIGTERM, as a scheduler sends it some time before SIGKILL, as a request that a loop can see."""

import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Self

type Handler = Callable[[int, FrameType | None], object] | int | signal.Handlers | None
EXIT_CODE = 128 + signal.SIGTERM


class Termination:
    """From SIGTERM on `is_requested`; a context manager.

    After `grace_period_s` more, or with a second SIGTERM, SystemExit ends whatever the main thread is doing. With a
    grace period of 0 the first one does. Outside the main thread signals cannot be handled, and nothing happens.
    """

    def __init__(self, grace_period_s: float) -> None:
        self.is_requested = False
        self._grace_period_s = grace_period_s
        self._previous: dict[signal.Signals, Handler] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._previous = {
                signal.SIGTERM: signal.signal(signal.SIGTERM, self._request),
                signal.SIGALRM: signal.signal(signal.SIGALRM, _exit),
            }
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._previous:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _request(self, number: int, frame: FrameType | None) -> None:
        if self.is_requested or not self._grace_period_s:
            _exit(number, frame)
        self.is_requested = True
        signal.setitimer(signal.ITIMER_REAL, self._grace_period_s)


def _exit(_number: int, _frame: FrameType | None) -> None:
    sys.exit(EXIT_CODE)
