"""What runs in a scorer's process: one response after another, until the driver closes the connection.

The process imports the environment and what that needs; no torch and no Ray, unless a user's function does. It takes
pickled episodes and answers in JSON: the driver unpickles nothing from a process in which anything can have happened.
It cannot stop itself in every case, so it is made to be killed (`process.py`).

It ends by itself after an answer where the next response would suffer: what was raised was no `Exception` (`sys.exit`,
a library's alarm), memory ran out, or more than half of what a response may take is still held.
"""

import contextlib
import ctypes
import faulthandler
import json
import math
import os
import resource
import signal
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from nemo_rl_offload.config.plugins import import_object
from nemo_rl_offload.environments.interface import Environment, Episode, Score
from nemo_rl_offload.errors import NemoRLOffloadError, WorkerError

LONGEST_TEXT = 300
"""Characters of an exception's message that are told."""
_PR_SET_PDEATHSIG = 1
_FIRST_TO_GO = b"1000"


class Setup(NamedTuple):
    """What a process is told first."""

    scorer: str
    """`"module:Class"` of an `Environment`."""
    arguments: Mapping[str, object]
    memory_limit_bytes: int | None
    """Private memory that a response may take over what the loaded environment holds; None: no limit."""


def main(descriptor: int, driver: int) -> None:
    """Score what comes over a socket, for the process whose id is `driver`."""
    os.set_inheritable(descriptor, False)
    connection = Connection(descriptor)
    _belong_to(driver)
    faulthandler.enable()
    setup: Setup = connection.recv()
    try:
        environment = import_object(setup.scorer)(**setup.arguments)
    except BaseException as error:  # noqa: BLE001 - of a user's module; told to the driver
        text = str(error) if isinstance(error, NemoRLOffloadError) else _describe(error)
        connection.send_bytes(json.dumps({"refused": text, "details": traceback.format_exc()}).encode())
        return
    enough_bytes = math.inf
    if setup.memory_limit_bytes is not None:
        held_bytes = _held_bytes()
        enough_bytes = held_bytes + setup.memory_limit_bytes / 2
        _limit_memory(held_bytes + setup.memory_limit_bytes)
    connection.send_bytes(json.dumps({"ready": True}).encode())
    is_spent, own = False, os.getpid()
    while not is_spent:
        try:
            episode = connection.recv()
        except (EOFError, ConnectionError):  # the driver has left, or left an answer unread
            break
        answer = _answer(environment, episode)
        exit_code = answer.pop("exit_code", 0 if "score" in answer else 1)
        if os.getpid() != own:  # a process that the scorer has forked, and that has left the scorer
            os._exit(exit_code)
        is_spent = answer["is_spent"] = answer.get("is_spent", False) or _held_bytes() > enough_bytes
        with contextlib.suppress(ConnectionError):
            connection.send_bytes(json.dumps(answer).encode())
    os._exit(0)  # without waiting for threads that a scorer has started


def _belong_to(driver: int) -> None:
    """End with the driver, however it ends; outlive signals to all processes of a job, after which the driver saves."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != driver:
        os._exit(1)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which programs that a scorer starts would inherit
    os.register_at_fork(after_in_child=_be_ended_by_signals)
    with contextlib.suppress(OSError):  # where memory is short, rather a scorer goes than the training
        os.write(file := os.open("/proc/self/oom_score_adj", os.O_WRONLY), _FIRST_TO_GO)
        os.close(file)


def _be_ended_by_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def _answer(environment: Environment, episode: Episode) -> dict[str, Any]:
    """Return what to send: `score`, `fatal` (the run must end), or `error` (the response cannot be scored)."""
    try:
        scores = environment.step([episode])
        name = type(environment).__name__
        if len(scores) != 1:
            raise WorkerError(f"{name}: returned {len(scores)} scores for one response.")
        reward, is_correct, scorer_error, observation, parts, _, answer, *_ = Score(*scores[0])
        if not math.isfinite(reward):
            raise WorkerError(f"{name}: returned the reward {reward}, which must be finite.")
        if not isinstance(observation, str | None):
            raise WorkerError(f"{name}: returned an observation that is neither text nor None.")
        if observation is not None:
            observation.encode()  # raises for half of a character, which no tokenizer takes
        if answer is not None:
            str(answer).encode()
        named = None if parts is None else {str(name): float(value) for name, value in parts.items()}
        return {"score": [float(reward), bool(is_correct), bool(scorer_error), observation, named, None, answer]}
    except NemoRLOffloadError as error:
        return {"fatal": str(error), "details": error.details or traceback.format_exc()}
    except BaseException as error:  # noqa: BLE001 - whatever it is, the run goes on
        return {
            "error": _describe(error),
            "kind": type(error).__name__,
            "details": traceback.format_exc(),
            "is_spent": isinstance(error, MemoryError) or not isinstance(error, Exception),
            "exit_code": _exit_code(error),
        }


def _exit_code(error: BaseException) -> int:
    """Python's own, of a process that ends by it."""
    if not isinstance(error, SystemExit):
        return 1
    return error.code & 0xFF if isinstance(error.code, int) else int(error.code is not None)


def _describe(error: BaseException) -> str:
    """Return the type, message and place of an exception, in one line that can be printed."""
    try:
        text = " ".join(str(error).split())
    except BaseException:  # noqa: BLE001 - of the exception's own method
        text = "(a message that cannot be shown)"
    shown = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text[:LONGEST_TEXT])
    place = traceback.extract_tb(error.__traceback__, limit=-1)[0]
    return f"{type(error).__name__}{f': {shown}' if shown else ''} ({place.filename}:{place.lineno})"


def _limit_memory(num_bytes: int) -> None:
    """Let no allocation go beyond; nor beyond a limit that this process has already, which only root may raise."""
    _, there = resource.getrlimit(resource.RLIMIT_DATA)
    limit = num_bytes if there == resource.RLIM_INFINITY else min(num_bytes, there)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _held_bytes() -> int:
    """Private writable memory and stacks, about as RLIMIT_DATA counts them."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[5]) * resource.getpagesize()
