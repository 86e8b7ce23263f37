"""The parent's side of a model's program under test: processes, pipes, limits, and what came of a test.

The verdict never comes from a process in which the program is. Of a program that reads and writes, the parent compares
the output; the right one is nowhere else. Of statements, a second process says that they ended well, over a pipe that
the program's process does not have (`code_calls.py`). Whatever else happens, the test has failed.

Each test has fresh processes, 0.07 s each. Rejected: one process for a record's tests, in which an early one can change
what later ones see; a fork of a process that has Python ready, which would be faster and hand over its memory.
"""

import contextlib
import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import NamedTuple

from nemo_rl_offload.environments.code_child import PASSED, READY
from nemo_rl_offload.errors import WorkerError

MAX_THREADS = 64
"""Of a process; one that has more is ended."""
LONGEST_MORE_OUTPUT = 1 << 16
"""Bytes of output beyond twice the right one, at which a program is ended."""
START_TIMEOUT_S = 60.0
"""Until a process is isolated; the test's own time begins then."""
_LOOK_S = 0.05
_PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])
_CODE = (
    "import sys; sys.path.append({root!r}); from nemo_rl_offload.environments.code_child import main; "
    "main({job}, {status}, {parent})"
)
_PACKAGES = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
_READABLE = [
    *(f"{sys.base_prefix}/lib", "/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache"),
    *("/usr/share/zoneinfo", "/dev/null", "/dev/urandom"),
]
_VARIABLES = {"PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


class Limits(NamedTuple):
    """What a program may take, and whether it is isolated."""

    timeout_s: float
    memory_bytes: int
    is_isolated: bool


def prints(program: str, given: str, wanted: str, limits: Limits) -> bool:
    """Whether a program that reads a text ends well and prints another; blanks at ends of lines do not count."""
    with contextlib.ExitStack() as stack:
        output, to_output = _pipe(stack)
        job = {"task": "standard_io", "source": program}
        process = _Process(stack, limits, job, given=given, output=to_output)
        to_output.close()
        most_bytes = 2 * len(wanted.encode()) + LONGEST_MORE_OUTPUT
        deadline_s = process.wait_until_ready() + limits.timeout_s
        said = _read(output, most_bytes, [process], deadline_s)
        is_same = said is not None and _lines(said.decode(errors="replace")) == _lines(wanted)
        return is_same and process.ends_well(deadline_s)


def passes(program: str, test: str, limits: Limits) -> bool:
    """Whether statements that use what a program defines end without an exception."""
    with contextlib.ExitStack() as stack:
        (asked, to_ask), (answered, to_answer), (verdict, to_verdict) = _pipe(stack), _pipe(stack), _pipe(stack)
        serving = _Process(stack, limits, {"task": "program", "source": program}, requests=asked, answers=to_answer)
        job = {"task": "tests", "source": test}
        asking = _Process(stack, limits, job, requests=to_ask, answers=answered, verdict=to_verdict)
        for pipe in (asked, to_ask, answered, to_answer, to_verdict):
            pipe.close()
        deadline_s = max(serving.wait_until_ready(), asking.wait_until_ready()) + limits.timeout_s
        return _read(verdict, len(PASSED), [serving, asking], deadline_s) == PASSED


class _Process:
    """A process of `code_child.py`, which is killed with all of its session at the stack's end."""

    def __init__(
        self,
        stack: contextlib.ExitStack,
        limits: Limits,
        job: Mapping[str, str],
        given: str = "",
        output: FileIO | None = None,
        **pipes: FileIO,
    ) -> None:
        self._status, to_status = _pipe(stack)
        descriptors = {name: pipe.fileno() for name, pipe in pipes.items()}
        told = {
            **dict.fromkeys(("requests", "answers", "verdict"), -1),
            **job,
            **descriptors,
            "is_isolated": limits.is_isolated,
            "memory_bytes": limits.memory_bytes,
            "packages": _PACKAGES,
            "readable": _READABLE,
        }
        job_file = _held(stack, json.dumps(told))
        numbers = {"job": job_file.fileno(), "status": to_status.fileno(), "parent": os.getpid()}
        self._process = subprocess.Popen(
            [sys.executable, "-s", "-P", "-S", "-B", "-X", "utf8", "-c", _CODE.format(root=_PACKAGE_ROOT, **numbers)],
            pass_fds=[job_file.fileno(), to_status.fileno(), *descriptors.values()],
            stdin=_held(stack, given),
            stdout=subprocess.DEVNULL if output is None else output,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
            env=_VARIABLES,
        )
        stack.callback(self._end)
        to_status.close()

    def wait_until_ready(self) -> float:
        """Wait until the process has given up its rights; returns when that was, by the monotonic clock.

        Raises:
            WorkerError: it could not, and nothing of the program or the tests has run.
        """
        told = _read(self._status, LONGEST_MORE_OUTPUT, [], time.monotonic() + START_TIMEOUT_S)
        if told == READY:
            return time.monotonic()
        if not told:
            raise RuntimeError("a program's process did not start")
        raise WorkerError(
            f"env.code_tests: a program's process could not be isolated or limited: {told.decode()}. Raise "
            "env.code_tests.memory_limit if memory ran out. Where this machine is a sandbox itself, set "
            "env.code_tests.sandbox=off."
        )

    def ends_well(self, deadline_s: float) -> bool:
        """Whether it ends by then, with code 0."""
        try:
            return self._process.wait(max(0.0, deadline_s - time.monotonic())) == 0
        except subprocess.TimeoutExpired:
            return False

    def has_too_many_threads(self) -> bool:
        try:
            return len(os.listdir(f"/proc/{self._process.pid}/task")) > MAX_THREADS
        except (FileNotFoundError, ProcessLookupError):
            return False

    def _end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _pipe(stack: contextlib.ExitStack) -> tuple[FileIO, FileIO]:
    """Both ends of a pipe, which are closed at the stack's end, if not before."""
    reading, writing = os.pipe()
    return stack.enter_context(FileIO(reading, "r")), stack.enter_context(FileIO(writing, "w"))


def _held(stack: contextlib.ExitStack, text: str) -> FileIO:
    """A file of memory with a text, which nobody can change."""
    descriptor = os.memfd_create("text", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    file = stack.enter_context(FileIO(descriptor, "r+"))
    file.write(text.encode())
    os.lseek(descriptor, 0, os.SEEK_SET)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    return file


def _read(pipe: FileIO, most_bytes: int, processes: Sequence[_Process], deadline_s: float) -> bytes | None:
    """What is written into a pipe until all have closed it; None: not by then, or it is more, or too many threads."""
    poll, said = select.poll(), b""
    poll.register(pipe, select.POLLIN)
    while len(said) <= most_bytes and not any(process.has_too_many_threads() for process in processes):
        remaining_s = deadline_s - time.monotonic()
        if remaining_s <= 0:
            return None
        if poll.poll(1000 * min(remaining_s, _LOOK_S)):
            chunk = pipe.read(LONGEST_MORE_OUTPUT)
            if not chunk:
                return said
            said += chunk
    return None


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
