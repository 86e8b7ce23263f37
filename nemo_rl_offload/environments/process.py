"""The driver's end of a scorer's process, which may be killed at any moment and is then started anew.

Why a process: a scorer can hang in C code that no alarm reaches, fill the memory, or end its process. Nothing within
can mend that; a SIGKILL from outside mends all of it. Why a child of the driver and no Ray actor: a kill and a new
start take 0.5 s, no Ray and no torch are imported, and the kernel ends the child with the driver. Why a new interpreter
and no fork: the driver has threads of Ray's and torch's, whose locks a fork copies as they are. Why not
`multiprocessing.Process`: that imports the driver's main module once more. Why not pebble's pool, which has a limit of
time for each task: it knows no limit of memory, leaves a worker that hangs in C behind when the driver is killed, and
starts its workers by `multiprocessing`; what was left to write would be most of this.

- The process leads a session, so that Ctrl-C in a terminal does not reach it; it is killed with all that is in there.
- Its standard output and error go to a file, since the driver's may be JSON.
- It sees no GPU, and has one thread for linear algebra unless the environment says otherwise.

The limit of memory is RLIMIT_DATA, on private writable memory. RLIMIT_AS counts addresses, of which libraries reserve
gigabytes that they never use (torch 3 GB, with CUDA tens). Shared memory is not counted, and each process that a scorer
starts has the same limit for itself.

This is no sandbox: a scorer has the user's rights to files and the network, and what it starts in a session of its own
lives on.
"""

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, BinaryIO

from nemo_rl_offload.environments.interface import Episode
from nemo_rl_offload.environments.worker import Setup
from nemo_rl_offload.runs.plain_files import open_to_append

SEND_TIMEOUT_S = 10
"""A process that waits for a response reads it long before; one that was stopped never does."""
_CODE = "import sys; sys.path[:] = {path!r}; from nemo_rl_offload.environments.worker import main; main({fd}, {pid})"


class ProcessEndedError(Exception):
    """The process is gone; the message says how."""


class ScorerProcess:
    """One process. Its first message says that it is ready, or why it never will be; the others answer `send`."""

    def __init__(self, setup: Setup, log: Path) -> None:
        self._setup = setup
        self._log = log
        self.start()

    def start(self) -> None:
        """Start the process, which takes a while; the one before must have ended."""
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_TIMEOUT_S, 0))
        with theirs, self._open_log() as log:
            path = [os.getcwd(), *sys.path]
            self._process = subprocess.Popen(
                [sys.executable, "-c", _CODE.format(path=path, fd=theirs.fileno(), pid=os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **os.environ, "CUDA_VISIBLE_DEVICES": ""},
            )
        self.connection = Connection(ours.detach())
        with contextlib.suppress(OSError):  # it has ended already, which `receive` tells
            self.connection.send(self._setup)

    def _open_log(self) -> BinaryIO:
        try:
            return open_to_append(self._log)
        except OSError:  # of which the pool tells; nobody needs what scorers print
            return open(os.devnull, "ab")

    def send(self, episode: Episode) -> None:
        """Have an episode scored. Raises ProcessEndedError."""
        try:
            self.connection.send(episode)
        except OSError as error:
            raise ProcessEndedError(self.kill()) from error

    def receive(self) -> Mapping[str, Any] | None:
        """Return the next message, None where there is none yet. Raises ProcessEndedError."""
        try:
            if self.connection.poll():
                message: Mapping[str, Any] = json.loads(self.connection.recv_bytes())
                return message
            # What the scorer has forked may hold the connection open when the process is gone.
            has_ended = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except (EOFError, OSError, ValueError) as error:
            raise ProcessEndedError(self.kill()) from error
        if has_ended:
            raise ProcessEndedError(self.kill())
        return None

    def kill(self) -> str:
        """End the process and what it has started; returns how the process ended, which may have been before."""
        self.connection.close()
        if self._process.returncode is None:  # else another group of processes may have its number by now
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        code = self._process.wait()
        if code == -signal.SIGKILL:
            return "was killed (SIGKILL), perhaps because memory ran out"
        return f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
