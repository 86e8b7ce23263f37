"""The same environment in several processes, and what becomes of a response that a scorer cannot bear.

Each process has one response at a time and gets the next with its answer: a hard one holds up no other, and is known
when something ends. A response whose scorer raises, is late, or takes its process with it is worth 0 and counted, and
the first failure of each kind is told. A process that is gone is replaced.

A process that ends, or has no memory left, may suffer from what earlier responses left behind. The response then gets a
second try in another process, and fails only there; that it needed one is told once.
"""

import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from nemo_rl_offload.config.environments import ENVIRONMENTS
from nemo_rl_offload.config.plugins import import_object
from nemo_rl_offload.config.schema import MasterConfig
from nemo_rl_offload.environments.interface import UNFINISHED, Episode, Score
from nemo_rl_offload.environments.process import ProcessEndedError, ScorerProcess
from nemo_rl_offload.environments.worker import Setup
from nemo_rl_offload.errors import ConfigError, WorkerError
from nemo_rl_offload.runs.output import OptionalLog
from nemo_rl_offload.runs.run_directory import SCORERS_FILE
from nemo_rl_offload.units import parse_bytes

FAILED = Score(0.0, is_correct=False, scorer_error=True)
START_TIMEOUT_S = 600.0
NUM_STARTS = 3
"""Starts of a process in a row that may end before its first answer."""
LOOK_AROUND_S = 1.0
"""How long nothing must be heard until processes are looked for that ended without a word."""
LONGEST_RESPONSE = 200
"""Characters of a response that are told."""


class _Worker:
    """A process and what it does."""

    def __init__(self, setup: Setup, log: Path) -> None:
        self.process = ScorerProcess(setup, log)
        self.num_starts = 0
        """Since the last answer."""
        self._begin()

    def restart(self) -> None:
        """Go on with a fresh process."""
        self.process.kill()
        self.process.start()
        self._begin()

    def _begin(self) -> None:
        self.num_starts += 1
        self.is_ready = False
        self.num_answers = 0
        self.index: int | None = None
        """Of the episode that is being scored."""
        self.deadline_s = time.monotonic() + START_TIMEOUT_S

    @property
    def is_idle(self) -> bool:
        return self.is_ready and self.index is None


class _Turn:
    """Episodes, which of them nobody has yet, and the scores so far."""

    def __init__(self, episodes: Sequence[Episode]) -> None:
        self.episodes = episodes
        self.waiting = deque(range(len(episodes)))
        self.scores: dict[int, Score] = {}
        self.raised: list[tuple[str, str]] = []
        """Kinds and descriptions of what was raised instead, for want of memory apart, and of processes' ends."""
        self.ended: dict[int, str] = {}
        """How a process ended that may not have been ended by its response, which was tried again."""

    @property
    def is_done(self) -> bool:
        return len(self.scores) == len(self.episodes)


class EnvironmentPool:
    """Processes of one environment.

    Args:
        section: of the configuration, with which messages begin.
        scorer: `"module:Class"` of an `Environment`.
        log: the file for what scorers print, and for tracebacks.
        num_workers: processes.
        timeout_s: for each response; None: no limit.
        memory_limit: for each response, over what the loaded environment takes, such as `"4GiB"`; None: no limit.
        arguments: of the environment.
    """

    def __init__(
        self,
        section: str,
        scorer: str,
        log: Path,
        *,
        num_workers: int,
        timeout_s: float | None,
        memory_limit: str | None,
        **arguments: object,
    ) -> None:
        setup = Setup(scorer, arguments, None if memory_limit is None else parse_bytes(memory_limit))
        self._section = section
        self._log = log
        self._failures = OptionalLog(log)
        self._timeout_s = float("inf") if timeout_s is None else timeout_s
        self._memory_limit = memory_limit
        self._told: set[str] = set()
        self._has_scored = False
        self._notices = self._failures.append("")
        self._workers = [_Worker(setup, log) for _ in range(num_workers)]
        self._one_at_a_time = threading.Lock()
        self._kill_all = weakref.finalize(self, _kill_all, self._workers)

    def step(self, episodes: Sequence[Episode]) -> list[Score]:
        """As `Environment.step`, which is asked about finished responses alone; from any thread, one call at a time.

        Raises:
            ConfigError: the environment cannot be made as configured.
            WorkerError: its processes do not start, the environment raised one, or it failed alike (the same exception,
                or the same end of its process) on each of the first responses, two or more, so that it is likely
                never to score any.
        """
        finished = [episode for episode in episodes if episode.finished]
        with self._one_at_a_time:
            scores = iter(self._score(finished))
        return [next(scores) if episode.finished else UNFINISHED for episode in episodes]

    def notices(self) -> list[str]:
        """What there is to tell since the last call: the first failure of each kind."""
        notices, self._notices = self._notices, []
        return notices

    def shutdown(self) -> None:
        """End the processes."""
        self._kill_all()
        with suppress(OSError):
            if not self._log.stat().st_size:
                self._log.unlink()

    def _score(self, episodes: Sequence[Episode]) -> list[Score]:
        assert self._kill_all.alive, "asked after shutdown"
        turn = _Turn(episodes)
        for worker in self._workers:
            if worker.index is not None:  # an exception ended the turn before
                self._start_anew(worker)
        while not turn.is_done:
            for worker in self._workers:
                if worker.is_idle and turn.waiting:
                    self._ask(worker, turn)
            for worker in self._due():
                self._hear(worker, turn)
        kinds = {kind for kind, _ in turn.raised}
        if not self._has_scored and len(turn.raised) == len(episodes) > 1 and len(kinds) == 1:
            raise WorkerError(
                f"{self._section}: the scorer failed alike on each of the first {len(episodes)} responses, so no "
                f"reward would mean anything: {turn.raised[0][1]}. Mend it, or let it return 0 for what it cannot "
                f"score. {self._log} has what it printed."
            )
        self._has_scored = self._has_scored or not all(score.scorer_error for score in turn.scores.values())
        if episodes and all(score.scorer_error for score in turn.scores.values()):
            self._tell("all", f"none of the {len(episodes)} responses of this turn could be scored; all count 0.")
        return [turn.scores[index] for index in range(len(episodes))]

    def _ask(self, worker: _Worker, turn: _Turn) -> None:
        worker.index = turn.waiting.popleft()
        worker.deadline_s = time.monotonic() + self._timeout_s
        try:
            worker.process.send(turn.episodes[worker.index])
        except ProcessEndedError as error:
            turn.waiting.appendleft(worker.index)
            self._restart(worker, str(error))

    def _due(self) -> list[_Worker]:
        """Wait; return those that have said something or are late, and all when nothing is heard for a while."""
        busy = [worker for worker in self._workers if not worker.is_idle]
        if not busy:
            return []
        remaining_s = min(worker.deadline_s for worker in busy) - time.monotonic()
        heard = wait([worker.process.connection for worker in busy], max(0.0, min(remaining_s, LOOK_AROUND_S)))
        now_s = time.monotonic()
        return [
            worker for worker in busy if not heard or worker.process.connection in heard or worker.deadline_s <= now_s
        ]

    def _hear(self, worker: _Worker, turn: _Turn) -> None:
        try:
            message = worker.process.receive()
        except ProcessEndedError as error:
            self._lose(worker, turn, str(error))
            return
        if message is None:
            if worker.deadline_s <= time.monotonic():
                self._interrupt(worker, turn)
        elif worker.index is None:
            if "refused" in message:
                raise _with_details(ConfigError(message["refused"]), message)
            worker.is_ready = True
        else:
            self._take(message, worker, turn)

    def _take(self, message: Mapping[str, Any], worker: _Worker, turn: _Turn) -> None:
        assert worker.index is not None
        if "fatal" in message:
            raise _with_details(WorkerError(message["fatal"]), message)
        if "score" in message:
            turn.scores[worker.index] = Score(*message["score"])
            if (how := turn.ended.get(worker.index)) is not None:
                self._tell(f"again: {how}", f"a scorer's process {how}. The response was scored in another.")
        elif message["kind"] == MemoryError.__name__ and worker.num_answers:
            turn.waiting.appendleft(worker.index)
        else:
            is_short = message["kind"] == MemoryError.__name__
            limit = f"; memory_limit is {self._memory_limit}" if is_short else ""
            if not is_short:
                turn.raised.append((message["kind"], message["error"]))
            self._fail(message["kind"], f"raised {message['error']}{limit}", worker.index, turn, message["details"])
        worker.index, worker.num_starts = None, 0
        worker.num_answers += 1
        if message["is_spent"]:
            self._start_anew(worker)

    def _interrupt(self, worker: _Worker, turn: _Turn) -> None:
        if worker.index is None:
            raise WorkerError(f"{self._section}: a scorer's process did not start in {START_TIMEOUT_S:g} s.")
        self._fail("late", f"took longer than timeout_s {self._timeout_s:g}", worker.index, turn)
        worker.num_starts = 0
        self._start_anew(worker)

    def _lose(self, worker: _Worker, turn: _Turn, how: str) -> None:
        """Go on after a process has ended."""
        if worker.index is not None and worker.num_answers:
            turn.waiting.appendleft(worker.index)
            turn.ended[worker.index] = how
        elif worker.index is not None:
            turn.raised.append((how, f"its process {how}"))
            self._fail(how, f"took its process with it, which {how}", worker.index, turn)
            worker.num_starts = 0
        self._restart(worker, how)

    def _restart(self, worker: _Worker, how: str) -> None:
        if worker.num_starts >= NUM_STARTS:
            raise WorkerError(
                f"{self._section}: a scorer's process {how}, {NUM_STARTS} times in a row before its first answer. "
                f"{self._log} may say why."
            )
        self._start_anew(worker)

    def _start_anew(self, worker: _Worker) -> None:
        """Raises WorkerError after `shutdown`, which a thread that still scores has missed."""
        if not self._kill_all.alive:
            raise WorkerError(f"{self._section}: its processes have been ended.")
        worker.restart()

    def _fail(self, kind: str, what: str, index: int, turn: _Turn, details: str = "") -> None:
        turn.scores[index] = FAILED
        response = turn.episodes[index].messages[-1]["content"]
        shown = response if len(response) <= LONGEST_RESPONSE else f"{response[:LONGEST_RESPONSE]}..."
        text = f"the scorer {what}. This response counts 0, as others like it will (scorer_errors): {shown!r}"
        self._tell(kind, text, details)

    def _tell(self, kind: str, text: str, details: str = "") -> None:
        """Once for each kind."""
        if kind not in self._told:
            self._told.add(kind)
            self._notices.append(f"{self._section}: {text}")
            self._notices.extend(self._failures.append(f"{self._section}: {text}\n{details}\n"))


def _with_details[E: (ConfigError, WorkerError)](error: E, message: Mapping[str, Any]) -> E:
    error.details = message["details"]
    return error


def _kill_all(workers: Sequence[_Worker]) -> None:
    for worker in workers:
        worker.process.kill()


def make_environment(config: MasterConfig, run_dir: Path) -> EnvironmentPool:
    """Start the processes of the environment that `data.env_name` names.

    Raises:
        ConfigError: its scorer, or a function that it is told of, cannot be imported.
    """
    name = config["data"]["env_name"]
    sections: Any = config["env"]
    scorer = ENVIRONMENTS[name].scorer
    assert scorer is not None, "it leads episodes"
    prepare = getattr(import_object(scorer), "prepare", dict)
    limits = {"timeout_s": None, "memory_limit": None}
    return EnvironmentPool(f"env.{name}", scorer, run_dir / SCORERS_FILE, **{**limits, **prepare(sections[name])})
