"""SIGINT and SIGTERM: what each means at every moment of a command. All handlers of this project stand here.

The command ends with code 130 in every case; what differs is what happens before. SIGINT is Python's KeyboardInterrupt
but for a run that trains, which it asks to save and end, as SIGTERM does; a second one is KeyboardInterrupt again.
SIGTERM has another handler in each phase, and the later ones give way to the former as their phase ends:

| phase | SIGTERM | set by |
|---|---|---|
| from the start of the command on | unwinds like Ctrl-C | `terminated_like_interrupted` |
| while Ray starts | waits until it has started; a second one unwinds at once | `Held` |
| from then on | SystemExit(143); Ray's own handler would end without unwinding | `exit_on_sigterm` |
| while a run trains | a checkpoint after the step, then SystemExit(143); at once for a second one | `Termination` |
| while Ray ends | waits until it has ended, with all that follow within `END_PATIENCE_S` | `Held` |

Ray's end is to be had only whole: half ended, its C++ part ends this process with code 1 as soon as it misses its
daemons. That part also takes our handlers away, somewhere on its way; they are set again every 0.2 ms (`Held.again`).
A SIGTERM that arrives within those ends the process as if nobody handled it.

SystemExit(143) never reaches the shell: the command line takes it for an interruption, so that whoever sent the signal
sees one code. An exception that Python could only print, because it met a `__del__`, is raised again (`never_unheard`).

Signals arrive in the main thread alone; elsewhere nothing here does anything.
"""

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Self

type Handler = Callable[[int, FrameType | None], object] | int | signal.Handlers | None
EXIT_CODE = 128 + signal.SIGTERM
REPEAT_INTERRUPT_S = 0.1
END_PATIENCE_S = 30.0
"""How long Ray may take to end, a few seconds as a rule, until a signal ends the wait for it."""


@contextlib.contextmanager
def terminated_like_interrupted() -> Iterator[None]:
    """SIGTERM unwinds like Ctrl-C, so that workers and Ray are gone when the process ends."""

    def interrupt(_signal: int, _frame: object) -> None:
        forget_rays_alarm()
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextlib.contextmanager
def never_unheard() -> Iterator[None]:
    """Interrupt again where Python could only print the exception: it met a `__del__`, or a callback from C."""
    previous, timers = sys.unraisablehook, []
    main_thread = threading.main_thread().ident
    assert main_thread is not None

    def again(unraisable: "sys.UnraisableHookArgs") -> None:
        if not issubclass(unraisable.exc_type, KeyboardInterrupt | SystemExit):
            previous(unraisable)
            return
        is_ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN  # in the background of a shell
        number = signal.SIGTERM if is_ignored or unraisable.exc_type is SystemExit else signal.SIGINT
        timers.append(threading.Timer(REPEAT_INTERRUPT_S, signal.pthread_kill, (main_thread, number)))
        timers[-1].start()

    sys.unraisablehook = again
    try:
        yield
    finally:
        sys.unraisablehook = previous
        for timer in timers:
            timer.cancel()


def forget_rays_alarm() -> None:
    """Where SIGTERM meets Ray's C++ part as it starts, that sets an alarm, and would abort the process after 3 s.

    Python hears of the signal later, whichever handler it has by then.
    """
    signal.alarm(0)


class Held:
    """SIGINT and SIGTERM take effect when the block has ended; a second one takes effect at once. A context manager.

    Outside the main thread, which is where signals arrive, nothing changes.

    Args:
        what: what is waited for, for the user.
        patience_s: how long the second one waits as well, and all that follow.
    """

    def __init__(self, what: str, patience_s: float = 0.0) -> None:
        self._what = what
        self._patience_s = patience_s
        self._arrived: list[int] = []
        self._previous: dict[int, Handler] = {}

    def __enter__(self) -> Self:
        self._end_s = time.monotonic() + self._patience_s
        if threading.current_thread() is threading.main_thread():
            numbers = [each for each in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(each) != signal.SIG_IGN]
            self._previous = {number: signal.signal(number, self._remember) for number in numbers}
        return self

    def again(self) -> None:
        """Hear signals again where something else may have set handlers."""
        for number in self._previous:
            signal.signal(number, self._remember)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if self._arrived:
            signal.raise_signal(self._arrived[0])

    def _remember(self, number: int, _frame: FrameType | None) -> None:
        forget_rays_alarm()
        is_patient = time.monotonic() < self._end_s
        if self._arrived and not is_patient:
            raise KeyboardInterrupt
        if not self._arrived:
            at_once = "" if is_patient else "; a second time, at once"
            sys.stderr.write(f"Ending as soon as {self._what} is done{at_once} ...\n")
        self._arrived.append(number)


class Termination:
    """From SIGINT or SIGTERM on `is_requested`; a context manager.

    With a second signal, or `grace_period_s` after SIGTERM, an exception ends whatever the main thread is doing:
    KeyboardInterrupt after SIGINT, else SystemExit. A person who presses Ctrl-C decides how long to wait. With a grace
    period of 0 the first signal does. `told` takes a line for the user. Outside the main thread signals cannot be
    handled, and nothing happens.
    """

    def __init__(self, grace_period_s: float, told: Callable[[str], None] = lambda _line: None) -> None:
        self.is_requested = False
        self._grace_period_s = grace_period_s
        self._told = told
        self._previous: dict[signal.Signals, Handler] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._previous = {
                signal.SIGTERM: signal.signal(signal.SIGTERM, self._request),
                signal.SIGALRM: signal.signal(signal.SIGALRM, exit_on_sigterm),
            }
            if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # in the background of a shell
                self._previous[signal.SIGINT] = signal.signal(signal.SIGINT, self._request)
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
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            exit_on_sigterm(number, frame)
        self.is_requested = True
        until = "; a second time, at once"
        if number == signal.SIGTERM:
            signal.setitimer(signal.ITIMER_REAL, self._grace_period_s)
            until = f", or at once in {self._grace_period_s:g} s"
        with contextlib.suppress(RuntimeError, OSError):  # the main thread was writing there, or nobody reads it
            self._told(f"Interrupted: when this step or validation is done, the run saves, and ends{until} ...")


def exit_on_sigterm(_number: int, _frame: FrameType | None) -> None:
    """A handler that unwinds by SystemExit."""
    forget_rays_alarm()
    sys.exit(EXIT_CODE)
