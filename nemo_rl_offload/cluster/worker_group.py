"""One Ray actor a rank, and one error for all of them.

Every rank runs `RankActor`, which builds the caller's class inside itself. That indirection buys three things
over making the class an actor directly. The process exists, with its environment set, before the class's
module (and with it torch) is imported. An exception in the constructor arrives like any other. And an
exception comes back as plain text with a time stamp, so one that cannot be pickled is reported as well as
any. `cli.command_line` prints it.

A call names a method of the worker's class, which carries the types of arguments and result to the caller; what
travels is its name, so that a subclass answers with its own. A method that takes long can yield what there is to tell
on the way, and return its result (`run_streamed`): a rank has one thread, and cannot be asked meanwhile. The rejected
alternative, a handle that looks like the worker, would hide that a call reaches every rank and returns a list. What
Ray itself returns has no type here.

When a rank fails, the others may hang in a collective for ever or fail a moment later with "connection
closed". So the group waits `GRACE_S` for more failures, reports the one that came first (a dead process
before any exception), and kills the rest. The limit: between nodes whose clocks differ, "first" is only as
good as the clocks.
"""

import math
import os
import re
import signal
import socket
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any, Concatenate, NoReturn

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from nemo_rl_offload.cluster.head import LOOK_S
from nemo_rl_offload.cluster.limits import memory_in_words, num_killed
from nemo_rl_offload.cluster.listening import bind_collectives
from nemo_rl_offload.cluster.virtual_cluster import ClusterPart, VirtualCluster
from nemo_rl_offload.errors import ConfigError, NemoRLOffloadError, ResourceError, WorkerError

GRACE_S = 1.0


@dataclass(frozen=True)
class Place:
    """The process of a rank, its log file, the address at which it listens, and a TCP port that is free there."""

    pid: int
    log: str
    address: str
    free_port: int


@dataclass(frozen=True)
class Failure:
    """An exception of a rank, as text; ``kind`` is its type where that is one of this project's errors."""

    rank: int
    message: str
    details: str
    time: float
    kind: type[NemoRLOffloadError] = WorkerError


@dataclass(frozen=True)
class Result:
    """What a method returned that yields other things before."""

    value: Any


@dataclass(frozen=True)
class Stored[T]:
    """A value in Ray's store on the node of the rank that put it there, and a copy on each node that gets it.

    As an argument of a call it travels from node to node without passing through the driver.
    """

    ref: ray.ObjectRef[T]

    @classmethod
    def put(cls, value: T) -> "Stored[T]":
        """Store a value; it is there until nobody holds this any more."""
        return cls(ray.put(value))

    def get(self) -> T:
        """The value; arrays in it are read-only views of the store."""
        return ray.get(self.ref)


class RankActor:
    """The process of one rank; holds the caller's worker object."""

    def locate(self, bind: str, node_address: str) -> Place | Failure:
        """Return what the driver must know of this process, whose collectives listen where `bind_collectives` says.

        Ray points its standard error to the log file.
        """
        try:
            address = bind_collectives(bind, node_address)
        except ConfigError as error:
            return _failure(error)
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            probe.bind((address, 0))
            free_port = probe.getsockname()[1]
        log = str(Path("/proc/self/fd/2").readlink())
        return Place(os.getpid(), log, address, free_port)

    def construct(
        self,
        master: tuple[str, int],
        worker_cls: Callable[..., object],
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> Failure | None:
        """Build the worker object; `master` is where all workers meet."""
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = master[0], str(master[1])
        try:
            self._worker = worker_cls(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - reported by the driver
            return _failure(error)
        return None

    def preload(self, module: str) -> None:
        """Import a module; one that cannot be imported is an error of the constructor that needs it."""
        with suppress(Exception):
            import_module(module)

    def call(self, method: str, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Return the method's result, or a `Failure`."""
        try:
            return getattr(self._worker, method)(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - reported by the driver
            return _failure(error)

    def stream(self, method: str, args: tuple[object, ...]) -> Iterator[object]:
        """Yield what the method yields, and in the end a `Result`, or a `Failure`."""
        try:
            yield Result((yield from getattr(self._worker, method)(*args)))
        except Exception as error:  # noqa: BLE001 - reported by the driver
            yield _failure(error)


def _failure(error: Exception) -> Failure:
    kind = type(error) if isinstance(error, NemoRLOffloadError) else None
    return Failure(
        rank=int(os.environ["RANK"]),
        message=str(error) if kind else f"{type(error).__name__}: {error}",
        details=traceback.format_exc(),
        time=time.time(),
        kind=kind or WorkerError,
    )


class WorkerGroup[W]:
    """One ``worker_cls(*args, **kwargs)`` in its own process per slot of ``cluster``, or of a part of it.

    ``env`` are environment variables for all of them, and ``name`` is what errors call a rank. With ``preloads``, a
    module that takes long to import, the processes import it while the caller goes on, and `construct` builds the
    workers; without, they are built at once. A worker that says nothing for ``silence_s`` of a call, once it is built,
    is taken to hang. Besides, each process
    has RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE and (on CPU) OMP_NUM_THREADS in its environment before the module
    of ``worker_cls`` is imported, and MASTER_ADDR and MASTER_PORT before its constructor runs. Ray sets
    CUDA_VISIBLE_DEVICES to the one GPU of the rank, so its device is ``cuda:0``.

    Raises:
        WorkerError: a constructor failed or a process died; an exception of this project keeps its type. The
            attribute ``details`` of the error holds the original traceback.
    """

    def __init__(
        self,
        cluster: VirtualCluster | ClusterPart,
        worker_cls: Callable[..., W],
        *args: object,
        env: Mapping[str, str] = MappingProxyType({}),
        name: str = "rank",
        preloads: str | None = None,
        silence_s: float = math.inf,
        **kwargs: object,
    ) -> None:
        self._name, self._silence_s = name, silence_s
        self._begun_s: dict[Any, float] = {}
        self._slots = cluster if isinstance(cluster, ClusterPart) else cluster.whole()
        self.world_size = self._slots.world_size
        self._places: list[Place] = []
        self._num_killed = num_killed()
        self._head = self._slots.cluster.head
        ranks = range(self.world_size)
        self._actors = [self._head.ask(partial(_start_actor, self._slots, rank, env)) for rank in ranks]
        bind, addresses = self._slots.cluster.bind, [self._slots.node_of(rank).address for rank in ranks]
        calls = zip(self._actors, addresses, strict=True)
        self._places = self._gather([actor.locate.remote(bind, address) for actor, address in calls])
        self._arguments = worker_cls, args, kwargs
        if preloads is None:
            self.construct()
        else:
            for actor in self._actors:
                actor.preload.remote(preloads)

    def construct(self) -> None:
        """Build the workers, where that has been put off.

        Raises:
            WorkerError: as for the class.
        """
        master = self._places[0].address, self._places[0].free_port
        self._gather([actor.construct.remote(master, *self._arguments) for actor in self._actors])

    def run_all[**P, R](self, method: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Call ``method`` with the same arguments on every rank and return the results in rank order.

        Raises:
            WorkerError: as for the class; all ranks have been killed, and the group is of no further use.
        """
        shared_args, shared_kwargs = self._head.ask(lambda: (ray.put(args), ray.put(kwargs)))
        refs = [actor.call.remote(method.__name__, shared_args, shared_kwargs) for actor in self._actors]
        return self._gather(refs, self._silence_s)

    def run_sharded[*Ts, R](self, method: Callable[[W, *Ts], R], shards: Sequence[tuple[*Ts]]) -> list[R]:
        """Call ``method(*shards[rank])`` on every rank and return the results in rank order.

        Raises:
            WorkerError: as for `run_all`.
        """
        assert len(shards) == self.world_size
        calls = zip(self._actors, shards, strict=True)
        return self._gather([actor.call.remote(method.__name__, shard, {}) for actor, shard in calls], self._silence_s)

    def run_streamed[*Ts, Y, R](
        self,
        method: Callable[[W, *Ts], Generator[Y, None, R]],
        shards: Sequence[tuple[*Ts]],
        take: Callable[[int, Y], None],
    ) -> list[R]:
        """As `run_sharded`; `take` gets the rank and what its ``method`` yields on the way.

        Raises:
            WorkerError: as for `run_all`.
        """
        assert len(shards) == self.world_size
        streams: dict[Any, int] = {
            actor.stream.options(num_returns="streaming").remote(method.__name__, shard): rank
            for rank, (actor, shard) in enumerate(zip(self._actors, shards, strict=True))
        }
        assert streams, "the worker group was shut down"
        results, failures = dict[int, R](), list[Failure]()
        deadline_s, heard_s = math.inf, dict.fromkeys(streams, time.monotonic())
        while streams and time.monotonic() < deadline_s:
            done: list[Any] = ray.wait(list(streams), timeout=GRACE_S if failures else LOOK_S)[0]
            self._head.check()
            heard_s |= dict.fromkeys(done, time.monotonic())
            if not failures and (late := self._late({stream: heard_s[stream] for stream in streams})):
                failures, deadline_s = [self._hangs(streams[late[0]])], 0
            for stream in done:
                rank = streams[stream]
                try:
                    outcome: Any = self._outcome(rank, next(stream))
                except StopIteration:
                    del streams[stream]
                    continue
                if isinstance(outcome, Failure):
                    failures.append(outcome)
                    deadline_s = min(deadline_s, time.monotonic() + GRACE_S)
                elif isinstance(outcome, Result):
                    results[rank] = outcome.value
                else:
                    take(rank, outcome)
        if failures:
            self._fail(failures)
        return [results[rank] for rank in range(self.world_size)]

    def begin[*Ts, R](self, rank: int, method: Callable[[W, *Ts], R], *args: *Ts) -> "ray.ObjectRef[R]":
        """Call ``method`` on one rank, whose result `ended` waits for."""
        assert self._actors, "the worker group was shut down"
        ref: ray.ObjectRef[R] = self._actors[rank].call.remote(method.__name__, args, {})
        self._begun_s[ref] = time.monotonic()
        return ref

    def ended[R](self, calls: Mapping["ray.ObjectRef[R]", int]) -> dict["ray.ObjectRef[R]", R]:
        """Wait, but not for long, until one of the ``calls`` has ended; the results of those that have.

        Each call has the rank that `begin` gave it to.

        Raises:
            WorkerError: as for `run_all`.
        """
        done, _ = ray.wait(list(calls), timeout=LOOK_S)
        self._head.check()
        outcomes: dict[Any, Any] = {ref: self._outcome(calls[ref], ref) for ref in done}
        for ref in done:
            del self._begun_s[ref]
        if late := self._late(self._begun_s):
            self._fail([self._hangs(calls[late[0]])])
        if failures := [outcome for outcome in outcomes.values() if isinstance(outcome, Failure)]:
            self._fail(failures)
        return outcomes

    def shutdown(self) -> None:
        """Kill every rank. May be called twice."""
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []

    def _late[T](self, heard_s: Mapping[T, float]) -> list[T]:
        return [call for call, then_s in heard_s.items() if time.monotonic() - then_s > self._silence_s]

    def _hangs(self, rank: int) -> Failure:
        log = f" Its log: {self._places[rank].log}"
        with suppress(ProcessLookupError):  # what is stopped does not hear Ray
            if self._slots.cluster.is_private:
                os.kill(self._places[rank].pid, signal.SIGKILL)
        return Failure(rank, f"it has said nothing for {self._silence_s:.0f} s, and is taken to hang.{log}", "", 0.0)

    def _gather(self, refs: list[ray.ObjectRef[object]], silence_s: float = math.inf) -> list[Any]:
        assert refs, "the worker group was shut down"
        outcomes: dict[ray.ObjectRef[object], object] = {}
        pending, failures, deadline_s = refs, list[Failure](), time.monotonic() + silence_s
        while pending and not failures:
            done, pending = ray.wait(pending, timeout=LOOK_S)
            self._head.check()
            outcomes |= {ref: self._outcome(refs.index(ref), ref) for ref in done}
            failures = [outcome for outcome in outcomes.values() if isinstance(outcome, Failure)]
            if pending and not failures and time.monotonic() > deadline_s:
                self._fail([self._hangs(refs.index(pending[0]))])
        if failures:
            late, _ = ray.wait(pending, num_returns=len(pending), timeout=GRACE_S) if pending else ([], [])
            self._head.check()  # its end takes the workers with it
            outcomes |= {ref: self._outcome(refs.index(ref), ref) for ref in late}
            failures = [outcome for outcome in outcomes.values() if isinstance(outcome, Failure)]
            self._fail(failures)
        return [outcomes[ref] for ref in refs]

    def _fail(self, failures: Sequence[Failure]) -> NoReturn:
        self.shutdown()
        first = min(failures, key=lambda failure: failure.time)
        raise _to_error(first, self._where(first.rank))

    def _outcome(self, rank: int, ref: ray.ObjectRef[object]) -> object:
        try:
            return ray.get(ref)
        except RayActorError as error:
            return Failure(rank, self._death(rank, str(error)), str(error), time=0.0)
        except RayError as error:
            cause = getattr(error, "cause", error)
            return Failure(rank, f"{type(cause).__name__}: {cause}", str(error), time.time())

    def _death(self, rank: int, report: str) -> str:
        exit_detail = re.search(r"Worker exit type: .*?(?= Some common causes|$)", report, re.MULTILINE)
        log = f" Its log: {self._places[rank].log}" if self._places else ""
        if self._slots.cluster.is_private and num_killed() > self._num_killed:
            return (
                f"the kernel killed the process for want of memory {memory_in_words()}. Raise that, or lower what a "
                "worker takes: policy.train_micro_batch_size, policy.max_total_sequence_length or "
                f"policy.megatron_cfg.activation_offload.host_memory_budget.{log}"
            )
        return (
            f"the process died. {exit_detail.group() if exit_detail else report} A crash leaves its trace at "
            f"the end of the log; a kill for lack of memory leaves one in the node's `dmesg`.{log}"
        )

    def _where(self, rank: int) -> str:
        pid = f", pid {self._places[rank].pid}" if self._places else ""
        return f"{self._name} {rank} of {self.world_size} ({self._slots.node_of(rank).address}{pid})"


def _to_error(failure: Failure, where: str) -> NemoRLOffloadError:
    # A full disk belongs to one machine; a wrong configuration or data set is the same on all.
    local = issubclass(failure.kind, WorkerError | ResourceError)
    error = failure.kind(f"{where}: {failure.message}" if local else failure.message)
    error.details = failure.details
    return error


def _start_actor(slots: ClusterPart, rank: int, extra_env: Mapping[str, str]) -> Any:
    cluster, node = slots.cluster, slots.node_of(rank)
    placement_group, local_rank = slots.slot_of(rank)
    share = {name: amount / cluster.groups_per_slot for name, amount in cluster.layout.slot(node).items()}
    env = {
        "RANK": str(rank),
        "WORLD_SIZE": str(slots.world_size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(cluster.workers_per_node),
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": os.pathsep.join(_own_import_paths()),
    }
    if cluster.device == "cpu":
        threads = max(1, int(node.num_cores) // cluster.workers_per_node)
        env["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", str(threads))
        # A thread that waits for the others spins, by default for long: beside one other busy process a step of the
        # tiny run took 7.5 s instead of 0.6 s. With a short spin it takes 1.0 s, and no longer on a quiet machine.
        env["GOMP_SPINCOUNT"] = os.environ.get("GOMP_SPINCOUNT", "1000")
    options = {
        "num_cpus": math.floor(share.get("CPU", 0) * 10_000) / 10_000,  # Ray counts in ten-thousandths
        "num_gpus": share.get("GPU", 0),
        "runtime_env": {"env_vars": env | dict(extra_env)},
        "scheduling_strategy": PlacementGroupSchedulingStrategy(
            placement_group, placement_group_bundle_index=local_rank
        ),
    }
    return ray.remote(RankActor).options(**options).remote()


def _own_import_paths() -> list[str]:
    """Return where this process imports from outside its Python installation, such as editable installs."""
    installation = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    return [path for path in sys.path if path and not path.startswith(installation)]
