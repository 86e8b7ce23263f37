"""Where the workers run: a Ray cluster, started here or joined, and one reserved slot for every rank.

One placement group per node, pinned to it by node id and packed strictly, keeps the ranks of a node on that
node: Ray's own PACK strategies may put two groups on one large node. A slot is one GPU and a share of the
node's cores.

A slot never takes more than half of the node's cores, divided by its workers. Whole cores per worker would
let four CPU workers wait forever on two cores, and would leave nothing for environment actors. The limit: on
a shared cluster Ray counts a worker as lighter than it is. Threads are limited separately, in `worker_group`.

Ray starts as a private local cluster (`private_ray`) unless `RAY_ADDRESS` names one to join; a cluster that
merely happens to run on this machine is left alone. A cluster that is joined decides itself whether it wants a
token: offering one to a cluster that uses none looks fine until its daemons cannot call this process back, and
then cancel every actor. Whatever waits for Ray goes through `head`, which knows when Ray can no more answer.
"""

import contextlib
import logging
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self

import psutil
import ray
from ray._private import ray_constants, services
from ray._private import worker as ray_worker
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from nemo_rl_offload.cluster.head import LOOK_S, Head, JoinedHead
from nemo_rl_offload.cluster.listening import AUTO
from nemo_rl_offload.cluster.private_ray import PrivateRay
from nemo_rl_offload.cluster.signals import END_PATIENCE_S, Held, exit_on_sigterm, forget_rays_alarm
from nemo_rl_offload.errors import NemoRLOffloadError, ResourceError
from nemo_rl_offload.units import human_duration

logger = logging.getLogger(__name__)

PLACEMENT_TIMEOUT_S = 60
RETURN_S = 600
"""How long a lost node may take to come back, which starts a machine or a pod anew."""
EXIT_TIMEOUT_S = 10
HEAR_AGAIN_S = 0.0002
START_EXIT_TIMEOUT_S = 1  # one of the daemons does not heed SIGTERM


@dataclass(frozen=True)
class Node:
    """One node of the Ray cluster, with the cores and GPUs that Ray counts there."""

    node_id: str
    address: str
    num_cores: float
    num_gpus: int


@dataclass(frozen=True)
class Layout:
    """The nodes that carry workers, in rank order, and what each of them carries."""

    device: Literal["cuda", "cpu"]
    nodes: tuple[Node, ...]
    workers_per_node: int

    def node_of(self, rank: int) -> Node:
        """Return the node of ``rank``; ranks fill one node after the other."""
        return self.nodes[rank // self.workers_per_node]

    def slot(self, node: Node) -> dict[str, float]:
        """Return the Ray resources that one worker on ``node`` reserves."""
        share = min(1.0, node.num_cores / (2 * self.workers_per_node))
        slot = {"CPU": math.floor(share * 10_000) / 10_000}  # Ray counts in ten-thousandths
        if self.device == "cuda":
            slot["GPU"] = 1.0
        return {name: amount for name, amount in slot.items() if amount > 0}


def choose_layout(
    nodes: Sequence[Node],
    num_nodes: int,
    gpus_per_node: int | Literal["auto"],
    device: Literal["cuda", "cpu"] | None = None,
) -> Layout:
    """Choose the nodes and the number of workers on each.

    With a GPU anywhere, a worker is a GPU and only nodes with enough of them count; ``auto`` takes as many on
    each chosen node as the poorest has. Without any GPU, ``auto`` is one CPU worker a node. Nodes with most
    GPUs come first. `device`: what workers are to be, whatever there is.

    Raises:
        ResourceError: fewer suitable nodes than asked for.
    """
    assert num_nodes >= 1
    assert gpus_per_node == "auto" or gpus_per_node >= 1
    if device is None:
        device = "cuda" if any(node.num_gpus for node in nodes) else "cpu"
    least_gpus = (1 if gpus_per_node == "auto" else gpus_per_node) if device == "cuda" else 0
    suitable = [node for node in nodes if (node.num_gpus >= least_gpus if least_gpus else node.num_cores > 0)]
    if len(suitable) < num_nodes:
        there = "; ".join(f"{node.address}: {node.num_gpus} GPUs, {node.num_cores:g} cores" for node in nodes)
        each = f"{least_gpus} or more GPUs" if least_gpus else "at least one core"
        raise ResourceError(
            f"The Ray cluster is too small for cluster.num_nodes={num_nodes} and cluster.gpus_per_node="
            f"{gpus_per_node}: {num_nodes} node(s) with {each} are needed, {len(suitable)} of {len(nodes)} "
            f"qualify ({there}). Lower these keys, or join a larger cluster by setting RAY_ADDRESS."
        )
    chosen = sorted(suitable, key=lambda node: (-node.num_gpus, node.address, node.node_id))[:num_nodes]
    if gpus_per_node != "auto":
        workers = gpus_per_node
    else:
        workers = min(node.num_gpus for node in chosen) if device == "cuda" else 1
    return Layout(device, tuple(chosen), workers)


class VirtualCluster:
    """Slots for ``world_size`` workers on a Ray cluster; a context manager.

    Args:
        num_nodes: nodes that carry workers.
        gpus_per_node: workers on each; ``auto`` takes the GPUs there are, or one CPU worker without any.
        groups_per_slot: worker groups that share each slot, and take turns.
        bind: the interface on which workers listen, or "auto" (`listening`).

    Attributes:
        head: what may be asked of Ray, and for how long.
        device: ``cuda`` or ``cpu``.
        world_size: number of ranks.
        workers_per_node: number of ranks on each node.
        layout: the chosen nodes.
        placement_groups: one per node, one bundle per rank.

    Raises:
        ResourceError: Ray cannot be started or joined, or is too small or too busy.
        WorkerError: a process of a Ray that was started here ended meanwhile.
    """

    def __init__(
        self,
        num_nodes: int,
        gpus_per_node: int | Literal["auto"],
        groups_per_slot: int = 1,
        *,
        bind: str = AUTO,
    ) -> None:
        self.groups_per_slot = groups_per_slot
        self.bind = bind
        self.placement_groups: tuple[PlacementGroup, ...] = ()
        self.head = Head()
        self._private_ray: PrivateRay | None = None
        self._connected_here = not ray.is_initialized()
        self._start(num_nodes, gpus_per_node)

    def _start(self, num_nodes: int, gpus_per_node: int | Literal["auto"]) -> None:
        try:
            if self._connected_here:
                if not os.environ.get("RAY_ADDRESS"):
                    self._private_ray = _new_private_ray()
                self.head = _connect(self._private_ray)
            self._take(num_nodes, gpus_per_node)
        except BaseException as error:
            self.shutdown(keep_logs=isinstance(error, Exception))
            raise

    @property
    def is_private(self) -> bool:
        """Whether all processes are below this one, on this machine."""
        return self._private_ray is not None

    def whole(self) -> "ClusterPart":
        """All slots, for one worker group."""
        return ClusterPart(self, 0, len(self.layout.nodes), 0, self.workers_per_node)

    def split(self, num_nodes: int | None, gpus_per_node: int | None) -> tuple["ClusterPart", "ClusterPart"]:
        """The slots without, and those with, the last `gpus_per_node` of the one node or the last `num_nodes` nodes.

        Raises:
            ResourceError: nothing would be left.
        """
        first, last = self.whole(), self.whole()
        if len(self.layout.nodes) > 1:
            assert num_nodes is not None
            cut = len(self.layout.nodes) - num_nodes
            first, last = replace(first, num_nodes=cut), replace(last, first_node=cut, num_nodes=num_nodes)
        else:
            assert gpus_per_node is not None
            cut = self.workers_per_node - gpus_per_node
            first = replace(first, workers_per_node=cut)
            last = replace(last, first_worker=cut, workers_per_node=gpus_per_node)
        if cut < 1:
            raise ResourceError(
                f"policy.generation.colocated.resources: {num_nodes or gpus_per_node} are to generate, which leaves "
                f"none of {len(self.layout.nodes)} node(s) with {self.workers_per_node} worker(s) each to train. Lower "
                "that, or raise cluster.gpus_per_node."
            )
        return first, last

    def renew(self) -> None:
        """End every worker in the slots, and take as many anew, on nodes that are alive; in a new Ray if need be.

        Where too few are left in a Ray that was joined, `RETURN_S` are given to one that comes back, or to another.

        Raises:
            ResourceError: there are too few.
            WorkerError: as for the class.
        """
        num_nodes, workers_per_node = len(self.layout.nodes), self.workers_per_node
        if self._private_ray and self.head.is_lost:
            self.shutdown(keep_logs=True)
            self._start(num_nodes, workers_per_node)
            return
        self._give_back()
        self._take(num_nodes, workers_per_node, self.device, 0.0 if self.is_private else RETURN_S)

    def _take(
        self,
        num_nodes: int,
        gpus_per_node: int | Literal["auto"],
        device: Literal["cuda", "cpu"] | None = None,
        patience_s: float = 0.0,
    ) -> None:
        end_s = time.monotonic() + patience_s
        while True:
            nodes = self.head.ask(_alive_nodes)
            try:
                self.layout = choose_layout(nodes, num_nodes, gpus_per_node, device)
            except ResourceError as error:
                if time.monotonic() < end_s:
                    time.sleep(LOOK_S)
                    continue
                waited = f" None came within {human_duration(patience_s)}." if patience_s else ""
                raise ResourceError(f"{error}{waited}") from error
            self.device = self.layout.device
            self.workers_per_node = self.layout.workers_per_node
            self.world_size = num_nodes * self.workers_per_node
            if self._reserve():
                return
            self._give_back()

    def _reserve(self) -> bool:
        """Wait for the slots; False when a chosen node turns out to be lost, which Ray notices after a while."""
        for node in self.layout.nodes:
            workers = self.layout.workers_per_node
            new_group = partial(
                placement_group,
                [self.layout.slot(node)] * workers,
                strategy="STRICT_PACK",
                bundle_label_selector=[{"ray.io/node-id": node.node_id}] * workers,
            )
            self.placement_groups += (self.head.ask(new_group),)
        for node, group in zip(self.layout.nodes, self.placement_groups, strict=True):
            end_s = time.monotonic() + PLACEMENT_TIMEOUT_S
            while not self.head.ask(partial(group.wait, timeout_seconds=1)):
                if node.node_id not in {alive.node_id for alive in self.head.ask(_alive_nodes)}:
                    return False
                if time.monotonic() >= end_s:
                    raise ResourceError(
                        f"Node {node.address} did not give {self.layout.workers_per_node} x "
                        f"{self.layout.slot(node)} in {PLACEMENT_TIMEOUT_S} s: another job holds them. "
                        "Wait for it (see `ray status`), or lower cluster.gpus_per_node."
                    )
        return True

    def shutdown(self, *, keep_logs: bool = False) -> None:
        """Give the slots back, and stop (or leave) Ray if it was started (or joined) here. Idempotent.

        With `keep_logs` Ray's logs of a run that failed stay for a while: see `PrivateRay`.
        """
        try:
            with contextlib.suppress(NemoRLOffloadError):  # nobody is there to take them
                self._give_back()
        finally:
            if self._connected_here:
                with Held("Ray's end", END_PATIENCE_S) as held:
                    self._end(held, keep_logs)

    def _end(self, held: Held, keep_logs: bool) -> None:
        processes, is_up = _processes_of_ray(), ray.is_initialized()
        if self._private_ray and self.head.is_lost:
            _signal(processes, psutil.Process.kill)
        _shut_ray_down(held)
        if not is_up:  # Ray ended what it knew: of a start that was interrupted, nothing
            _signal(processes, psutil.Process.terminate)
        _see_off(processes, EXIT_TIMEOUT_S if is_up else START_EXIT_TIMEOUT_S)
        self.head.close()
        self.head = Head()
        if self._private_ray:
            self._private_ray.close(keep=keep_logs)
            self._private_ray = None

    def _give_back(self) -> None:
        groups, self.placement_groups = self.placement_groups, ()
        for group in groups:
            self.head.ask(partial(remove_placement_group, group))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown(keep_logs=isinstance(error, Exception))


@dataclass(frozen=True)
class ClusterPart:
    """Some of a cluster's slots: the same ones of neighbouring nodes. Ranks fill one node after the other."""

    cluster: VirtualCluster
    first_node: int
    num_nodes: int
    first_worker: int
    """Of each node's slots."""
    workers_per_node: int

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.num_nodes * self.workers_per_node

    def node_of(self, rank: int) -> Node:
        """The node of a rank."""
        return self.cluster.layout.nodes[self.first_node + rank // self.workers_per_node]

    def slot_of(self, rank: int) -> tuple[PlacementGroup, int]:
        """The placement group of a rank, and the number of its bundle there."""
        node, worker = divmod(rank, self.workers_per_node)
        return self.cluster.placement_groups[self.first_node + node], self.first_worker + worker


def _new_private_ray() -> PrivateRay:
    try:
        return PrivateRay()
    except OSError as error:
        raise ResourceError(f"Could not start a local Ray cluster: {error}") from error


def _connect(private_ray: PrivateRay | None) -> Head:
    """Start Ray, or without one join that at RAY_ADDRESS."""
    # Under `uv run`, Ray would upload the working directory and start each worker through its own `uv run`: a
    # copy of the sources and a synchronization per worker, though workers share this environment already. The
    # variable RAY_ENABLE_UV_RUN_RUNTIME_ENV counts only before Ray's first import; this is the value it sets.
    ray_constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV = False
    # Ray prints what its daemons report to standard output, even with log_to_driver=False.
    ray_worker.print_to_stdstream = _log_daemon_message
    address = os.environ.get("RAY_ADDRESS")
    try:
        if private_ray is None:
            assert address
            _probe(address)
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
            host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
            head: Head = JoinedHead(host.strip("[]"), int(port))
        else:
            try:
                head = private_ray.start()
            except Exception as error:
                if "timed out during startup" not in str(error):
                    raise
                ray.shutdown()
                head = private_ray.start()  # Ray's 30 s are soon over; its files are in memory the second time
    except SystemExit:
        forget_rays_alarm()
        raise
    except Exception as error:  # Ray raises plain ones too: "node timed out during startup"
        if private_ray:
            raise ResourceError(f"Could not start a local Ray cluster: {error}") from error
        raise ResourceError(
            f"Could not join the Ray cluster at RAY_ADDRESS={address}: {error}. Is it running, and if it uses token "
            "authentication, are RAY_AUTH_MODE=token and its RAY_AUTH_TOKEN set here?"
        ) from error
    if threading.current_thread() is threading.main_thread():
        # Ray's own handler prints a native stack and exits without running `VirtualCluster.__exit__`.
        signal.signal(signal.SIGTERM, exit_on_sigterm)
    return head


def _shut_ray_down(held: Held) -> None:
    """In a thread: on the way Ray sets SIGTERM to what kills this process, for as long as nobody sets it again."""
    errors: list[BaseException] = []

    def work() -> None:
        try:
            ray.shutdown(wait_for_processes=True)
        except BaseException as error:  # noqa: BLE001 - raised again below
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(HEAR_AGAIN_S)
        held.again()
    if errors:
        raise errors[0]


def _processes_of_ray() -> list[psutil.Process]:
    """Those below this process: none where Ray was joined, and none of a program's own that has Ray's folder in an
    argument, as a fork server has it in its path."""
    found, files = [], os.path.join(os.path.dirname(ray.__file__), "")
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if any(part.startswith(("ray::", files)) for part in process.cmdline()):
                found.append(process)
    return found


def _see_off(processes: list[psutil.Process], timeout_s: float) -> None:
    """Ray waits for its daemons, not for the workers, which may take a while to end on a busy machine."""
    _, alive = psutil.wait_procs(processes, timeout=timeout_s)
    _signal(alive, psutil.Process.kill)
    psutil.wait_procs(alive, timeout=EXIT_TIMEOUT_S)


def _signal(processes: list[psutil.Process], send: Callable[[psutil.Process], None]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            send(process)


def _probe(address: str) -> None:
    """Fail at once where nobody listens; Ray would retry for over a minute.

    Where `auto` finds no cluster that lives, it is the one that `ray start` has written down, which may have ended
    without `ray stop`.
    """
    if address == "auto":
        address = services.canonicalize_bootstrap_address(address) or address
    host, separator, port = address.rpartition(":")
    if separator and "://" not in address:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()


def _log_daemon_message(data: dict[str, Any], ignore_prefix: bool) -> None:
    logger.info("Ray: %s", "\n".join(data["lines"]))


def _alive_nodes() -> list[Node]:
    return [
        Node(
            node_id=node["NodeID"],
            address=node["NodeManagerAddress"],
            num_cores=node["Resources"].get("CPU", 0.0),
            num_gpus=int(node["Resources"].get("GPU", 0)),
        )
        for node in ray.nodes()  # type: ignore[no-untyped-call]
        if node["Alive"]
    ]
