"""The driver's end of NeMo-Gym: a process of its own Python, which starts its servers and runs episodes.

NeMo-Gym's packages exclude some of this project's, so it has an environment of its own, and is told what to do by lines
of JSON (`child`). Rejected: one environment for both, which no resolver finds; and NeMo-Gym's own commands, which read
a file of episodes and write one, so that an episode would be known when all have ended.

- The process leads a session, so that Ctrl-C in a terminal does not reach it; it is killed with all that it started.
- What its servers print goes to a file.
- It has a Ray cluster of its own, which NeMo-Gym starts: this run's has other versions of Python or of Ray.
"""

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_rl_offload.config.rules.nemo_gym import GYM, INSTALL, fault_of_python
from nemo_rl_offload.environments.nemo_gym import child
from nemo_rl_offload.errors import ConfigError, WorkerError
from nemo_rl_offload.runs.plain_files import open_to_append

Number = int
START_S = 1800.0
"""At most, until the servers answer: each has its own environment, which is installed the first time."""
END_S = 10.0
"""How long they may take to end by themselves."""
SHOWN_LINES = 15
"""Of what the servers have printed, in a message."""
_OF_THIS_PYTHON = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "UV_PROJECT_ENVIRONMENT")


class GymProcess:
    """NeMo-Gym's servers. Its methods may be called by several threads."""

    def __init__(self, python: Path, config: Mapping[str, Any], log: Path) -> None:
        """Begin to start them; `config` is NeMo-Gym's global configuration, `log` the file for what they print.

        Raises:
            ConfigError: there is no interpreter, or it has no nemo-gym.
        """
        self._log = log
        if (fault := fault_of_python(python)) is not None:
            raise ConfigError(f"{GYM}.python: {fault}")
        env = {name: value for name, value in os.environ.items() if name not in _OF_THIS_PYTHON}
        env = {name: value for name, value in env.items() if not name.startswith("RAY_")}
        env |= {"RAY_ADDRESS": "local", "PATH": f"{python.parent}{os.pathsep}{env.get('PATH', '')}"}
        try:
            looked = subprocess.run([python, "-c", "import nemo_gym"], env=env, stderr=subprocess.PIPE, text=True)
        except OSError as error:
            raise ConfigError(f"{GYM}.python: {python} is no interpreter: {error}. {INSTALL}.") from error
        if looked.returncode:
            why = (looked.stderr.strip().splitlines() or ["nothing was said"])[-1]
            raise ConfigError(f"{GYM}.python: {python} has no nemo-gym ({why}). {INSTALL}.")
        with open_to_append(log) as file:
            self._process = subprocess.Popen(
                [python, child.__file__, str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                start_new_session=True,
                env=env,
            )
        self._sending, self._waiting = threading.Lock(), threading.Lock()
        self._ready: queue.SimpleQueue[Mapping[str, Any]] = queue.SimpleQueue()
        self._asked: dict[Number, queue.SimpleQueue[tuple[Number, Mapping[str, Any]]]] = {}
        self._num_asked = 0
        self._agents: tuple[str, ...] | None = None
        with contextlib.suppress(BrokenPipeError):  # it has ended already, which `wait` tells
            self._send({**config, "head_server": {"host": "127.0.0.1", "port": _free_port()}})
        threading.Thread(target=self._listen, name="NeMo-Gym", daemon=True).start()

    def wait(self) -> tuple[str, ...]:
        """Wait until the servers answer; the names of the agents.

        Raises:
            WorkerError: they have ended, or do not answer in time.
        """
        with self._waiting:
            if self._agents is None:
                try:
                    self._agents = tuple(self._ready.get(timeout=START_S)["agents"])
                except queue.Empty:
                    lines = self._last_lines()
                    raise WorkerError(f"{GYM}: its servers did not start in {START_S:g} s.\n{lines}") from None
                except KeyError:
                    self._ready.put({})  # for whoever waits as well
                    raise WorkerError(self.ended()) from None
            return self._agents

    def ask(self, row: Mapping[str, Any], answers: "queue.SimpleQueue[tuple[Number, Mapping[str, Any]]]") -> Number:
        """Have an agent run an episode; `answers` gets its number, and `result` (text) or `error`.

        Raises:
            WorkerError: the servers have ended.
        """
        with self._sending:
            number, self._num_asked = self._num_asked, self._num_asked + 1
            self._asked[number] = answers
        try:
            self._send({"number": number, "row": row})
        except (BrokenPipeError, ValueError):
            raise WorkerError(self.ended()) from None
        return number

    def check(self) -> None:
        """Raise WorkerError where the servers have ended."""
        if self._process.poll() is not None:
            raise WorkerError(self.ended())

    def ended(self) -> str:
        """How the servers ended, and what was printed before."""
        code = self._process.wait()
        return f"{GYM}: its servers ended with code {code}. {self._log} has what they printed:\n{self._last_lines()}"

    def stop(self, *, at_once: bool = False) -> None:
        """End the servers, and all that they started; `at_once` without waiting for them. May be called twice."""
        with contextlib.suppress(BrokenPipeError, ValueError):
            if self._process.stdin is not None and not at_once:
                self._process.stdin.close()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(END_S)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        text = json.dumps(message) + "\n"
        with self._sending:
            self._process.stdin.write(text)
            self._process.stdin.flush()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            message = json.loads(line)
            if "agents" in message:
                self._ready.put(message)
            else:
                self._asked.pop(message["number"]).put((message["number"], message))
        self._ready.put({})

    def _last_lines(self) -> str:
        try:
            lines = self._log.read_text(errors="replace").splitlines()
        except OSError as error:
            return str(error)
        return "\n".join(lines[-SHOWN_LINES:])


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
