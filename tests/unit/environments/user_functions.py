"""Functions as a user may write them for `env.function.path`."""

import ctypes
import os
import re
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

Messages = Sequence[Mapping[str, str]]


def shorter_is_better(messages: Messages, entry: Mapping[str, Any], scale: float = 1.0) -> float:
    return scale / len(messages[-1]["content"])


def try_again(messages: Messages, entry: Mapping[str, Any]) -> dict[str, Any]:
    right = messages[-1]["content"] == entry["answer"]
    return {"reward": float(right), "observation": None if right else "Wrong. Again: ", "done": right}


def returns(messages: Messages, entry: Mapping[str, Any], what: Any = None) -> Any:
    return what


def half_a_character(messages: Messages, entry: Mapping[str, Any]) -> dict[str, Any]:
    return {"reward": 1, "observation": "\ud800"}


def as_in_trl(prompts: Sequence[Any], completions: Sequence[Any], **kwargs: Any) -> list[float]:
    return [0.0] * len(completions)


def takes_one_argument(messages: Messages) -> float:
    return 1.0


NOT_CALLABLE = 3


class NoExceptionError(BaseException):
    """As some libraries have for a limit of time."""


class UnprintableError(Exception):
    def __str__(self) -> NoReturn:
        raise SystemExit


def overflow_the_stack() -> int:
    return overflow_the_stack() + 1


def swallow() -> None:
    while True:
        try:
            time.sleep(60)
        except BaseException:  # noqa: BLE001
            continue


def fill() -> None:
    blocks = []
    while True:
        blocks.append(bytearray(1 << 20))


def throw(error: type[BaseException] | BaseException) -> NoReturn:
    raise error


def leave_a_child_and_go() -> None:
    if os.fork() == 0:
        time.sleep(60)
    os._exit(1)


def close_everything() -> None:
    os.closerange(3, 256)


MISDEEDS = {
    "an exception": lambda: throw(ValueError("bad \ud800\x1b[31m\nvalue")),
    "one without a message": lambda: throw(UnprintableError),
    "no exception": lambda: throw(NoExceptionError("timed out")),
    "an exit": lambda: sys.exit(3),
    "an interrupt": lambda: throw(KeyboardInterrupt),
    "the end of a generator": lambda: throw(GeneratorExit),
    "recursion": overflow_the_stack,
    "an end of the process": lambda: os._exit(0),
    "an end while a child lives": leave_a_child_and_go,
    "a segmentation fault": lambda: ctypes.string_at(0),
    "an abort": os.abort,
    "the OOM killer": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "an alarm": lambda: signal.raise_signal(signal.SIGALRM),
    "a closed connection": close_everything,
    "memory": fill,
    "much memory at once": lambda: bytearray(1 << 40),
    "a hang in C": lambda: re.match(r"(a+)+$", "a" * 60 + "b"),
    "a hang that swallows": swallow,
    "a stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
}


def misbehaves(messages: Messages, entry: Mapping[str, Any]) -> float:
    misdeed = MISDEEDS.get(messages[-1]["content"])
    if misdeed is not None:
        misdeed()
    return 1.0


def is_alone(messages: Messages, entry: Mapping[str, Any]) -> float:
    """Whether nothing is imported that scoring does not need, and no GPU is seen."""
    return float(not {"torch", "ray", "transformers"} & {*sys.modules} and not os.environ["CUDA_VISIBLE_DEVICES"])


def shouts(messages: Messages, entry: Mapping[str, Any]) -> float:
    print("a line to standard output", flush=True)
    os.write(1, b"bytes to standard output\n")
    os.write(2, b"bytes to standard error\n")
    return 1.0


def keeps(messages: Messages, entry: Mapping[str, Any], kept: list[bytearray] = []) -> float:  # noqa: B006
    """Keep what a response of this many MiB leaves behind; returns how many it kept before."""
    kept.append(bytearray(int(messages[-1]["content"]) << 20))
    return float(len(kept))


def forks(messages: Messages, entry: Mapping[str, Any]) -> float:
    """A child leaves the function; returns an eighth more than its exit code's."""
    way = messages[-1]["content"]
    if way == "plain":
        return 1.0
    if (pid := os.fork()) == 0:
        if way == "returns":
            return 0.5
        throw(ValueError("in the child")) if way == "raises" else sys.exit(int(way))
    return (1 + os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])) / 8


def ends_late(messages: Messages, entry: Mapping[str, Any]) -> float:
    """A response takes its process with it, but only while the next one is scored."""
    if messages[-1]["content"] == "dies later":
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
    else:
        time.sleep(0.3)
    return 1.0
