"""A local cluster of two CPU workers: collectives, failures as one error, and nothing left behind."""

import os
import re
import signal
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress

import psutil
import pytest
from cpu_processes import cpu_cluster, without_gpus
from patience import PATIENCE_S, eventually, is_running
from ray.cluster_utils import Cluster

from nemo_rl_offload.cluster import head
from nemo_rl_offload.cluster.virtual_cluster import VirtualCluster
from nemo_rl_offload.cluster.worker_group import WorkerGroup
from nemo_rl_offload.errors import ResourceError, WorkerError


class GlooWorker:
    """Joins a process group in its constructor, like a training worker."""

    def __init__(self) -> None:
        import torch.distributed as dist

        dist.init_process_group("gloo")

    def describe(self) -> dict[str, int]:
        import torch

        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "EXTRA")
        return {name: int(os.environ[name]) for name in names} | {
            "pid": os.getpid(),
            "threads": torch.get_num_threads(),
        }

    def total(self, value: float, scale: float = 1.0) -> float:
        import torch
        import torch.distributed as dist

        tensor = torch.tensor(value * scale)
        dist.all_reduce(tensor)
        return tensor.item()

    def fail(self, rank: int) -> None:
        if os.environ["RANK"] == str(rank):
            raise UnpicklableError("first line\nsecond line")
        self.total(1.0)


HANG_S = 10 * PATIENCE_S


def below_this_process() -> dict[int, str]:
    """Command lines by process."""
    found = {}
    for each in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it ends
            found[each.pid] = " ".join(each.cmdline())
    return found


class TellingWorker:
    """Yields what it is at; a rank that has nothing more to yield fails, dies or returns."""

    def pid(self) -> int:
        return os.getpid()

    def work(self, count: int, end: str) -> Generator[tuple[int, str], None, str]:
        for number in range(count):
            yield number, os.environ["RANK"]
        if end == "fail":
            raise UnpicklableError("said so")
        if end == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if end == "hang":
            time.sleep(HANG_S)
        return f"{end} {count}"

    def work_slowly(self, count: int) -> Generator[int, None, int]:
        for number in range(count):
            time.sleep(0.5)
            yield number
        return count


class HangingWorker:
    def pid(self) -> int:
        return os.getpid()

    def die(self, rank: int) -> None:
        if os.environ["RANK"] == str(rank):
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(HANG_S)


class StoppingWorker:
    """A rank that says something, and then is stopped, as by a debugger, or waits forever."""

    def pid(self) -> int:
        return os.getpid()

    def work(self, how: str) -> Generator[str, None, None]:
        yield how
        self.stop(how)

    def stop(self, how: str) -> None:
        if how == "stops":
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(HANG_S if how == "waits" else 0)


class UnpicklableError(Exception):
    def __reduce__(self) -> str:
        raise TypeError("not this one")


@pytest.fixture(scope="module")
def cluster() -> Iterator[VirtualCluster]:
    with cpu_cluster(2) as cluster:
        yield cluster


@pytest.mark.slow
def test_what_ranks_tell_on_the_way_comes_in_order(cluster: VirtualCluster) -> None:
    group = WorkerGroup(cluster, TellingWorker)
    told: list[tuple[int, tuple[int, str]]] = []
    results = group.run_streamed(TellingWorker.work, [(0, "none"), (3, "some")], lambda *each: told.append(each))
    assert results == ["none 0", "some 3"]
    assert told == [(1, (number, "1")) for number in range(3)]
    assert group.run_streamed(TellingWorker.work, [(1, "a"), (1, "b")], lambda *_: None) == ["a 1", "b 1"], "again"
    group.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "message"), [("fail", "rank 1 of 2 .*UnpicklableError: said so"), ("die", "rank 1 .*died")]
)
def test_a_rank_that_fails_on_the_way_ends_the_others(cluster: VirtualCluster, end: str, message: str) -> None:
    group = WorkerGroup(cluster, TellingWorker)
    pids, told = group.run_all(TellingWorker.pid), list[int]()
    with pytest.raises(WorkerError, match=message):
        group.run_streamed(TellingWorker.work, [(1, "hang"), (2, end)], lambda rank, _: told.append(rank))
    assert eventually(lambda: not any(map(is_running, pids)))
    assert end == "die" or sorted(told) == [0, 1, 1], "the dead may not have sent it"


def call_all(group: WorkerGroup[StoppingWorker], how: str) -> None:
    group.run_sharded(StoppingWorker.stop, [("goes on",), (how,)])


def call_streamed(group: WorkerGroup[StoppingWorker], how: str) -> None:
    group.run_streamed(StoppingWorker.work, [("goes on",), (how,)], lambda *_: None)


def call_one(group: WorkerGroup[StoppingWorker], how: str) -> None:
    calls = {group.begin(1, StoppingWorker.stop, how): 1}
    while True:
        group.ended(calls)


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize(
    ("call", "how"), [(call_all, "stops"), (call_streamed, "stops"), (call_streamed, "waits"), (call_one, "waits")]
)
def test_a_rank_that_says_nothing_for_too_long_ends_the_others(
    cluster: VirtualCluster, call: Callable[[WorkerGroup[StoppingWorker], str], None], how: str
) -> None:
    group = WorkerGroup(cluster, StoppingWorker, silence_s=2.0, name="engine")
    pids = group.run_all(StoppingWorker.pid)
    with pytest.raises(WorkerError, match=r"engine 1 of 2 .*said nothing for 2 s, and is taken to hang\. Its log: /"):
        call(group, how)
    assert eventually(lambda: not any(map(is_running, pids)))


@pytest.mark.slow
def test_a_rank_that_says_something_now_and_then_may_take_long(cluster: VirtualCluster) -> None:
    group = WorkerGroup(cluster, TellingWorker, silence_s=2.0)
    assert group.run_streamed(TellingWorker.work_slowly, [(6,), (1,)], lambda *_: None) == [6, 1]
    group.shutdown()


@pytest.mark.slow
def test_collective_then_exception_of_one_rank(cluster: VirtualCluster) -> None:
    group = WorkerGroup(cluster, GlooWorker, env={"EXTRA": "7"})
    described = group.run_all(GlooWorker.describe)
    pids = [worker["pid"] for worker in described]
    assert (cluster.device, cluster.world_size, cluster.workers_per_node) == ("cpu", 2, 2)
    assert [(worker["RANK"], worker["LOCAL_RANK"]) for worker in described] == [(0, 0), (1, 1)]
    assert all(worker["WORLD_SIZE"] == worker["LOCAL_WORLD_SIZE"] == 2 for worker in described)
    assert all(worker["EXTRA"] == 7 for worker in described)
    assert all(worker["threads"] == worker["OMP_NUM_THREADS"] for worker in described)
    assert group.run_sharded(GlooWorker.total, [(1.0, 2.0), (10.0, 2.0)]) == [22.0, 22.0]

    with pytest.raises(WorkerError) as caught:
        group.run_all(GlooWorker.fail, rank=1)
    where = f"rank 1 of 2 ({cluster.layout.nodes[0].address}, pid {pids[1]})"
    assert str(caught.value) == f"{where}: UnpicklableError: first line\nsecond line"
    assert "in fail" in vars(caught.value)["details"]
    assert eventually(lambda: not any(map(is_running, pids)))


@pytest.mark.slow
def test_killed_rank_is_one_error(cluster: VirtualCluster) -> None:
    group = WorkerGroup(cluster, HangingWorker)
    pids = group.run_all(HangingWorker.pid)
    with pytest.raises(WorkerError, match=rf"^rank 0 of 2 \(.*, pid {pids[0]}\): the process died\. ") as caught:
        group.run_all(HangingWorker.die, rank=0)
    assert f"-{pids[0]}.err" in str(caught.value)
    print(caught.value)
    assert eventually(lambda: not any(map(is_running, pids)))


@pytest.mark.usefixtures("cluster")
def test_of_ray_what_a_run_needs_is_started() -> None:
    """Not what grows a cluster, nor what prints the workers' output; and no worker that nobody has asked for."""
    commands = below_this_process().values()
    assert any("/raylet " in line for line in commands)
    assert [line for line in commands if "monitor.py" in line or line.startswith("ray::IDLE")] == []


def test_too_few_nodes(cluster: VirtualCluster) -> None:
    with pytest.raises(ResourceError, match="7 node"):
        VirtualCluster(num_nodes=7, gpus_per_node=1)
    assert cluster.placement_groups


def test_shutdown_leaves_no_process(cluster: VirtualCluster) -> None:
    # other tests of this run may have left helpers of theirs
    children = [pid for pid, command in below_this_process().items() if re.search(r"ray::|/ray/", command)]
    assert children
    cluster.shutdown()
    assert eventually(lambda: not any(map(is_running, children)))


@pytest.mark.sampled
@pytest.mark.slow
def test_workers_of_a_lost_node_go_on_another(cluster: VirtualCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.shutdown()
    with without_gpus():
        nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        with without_gpus():
            workers = [nodes.add_node(num_cpus=1, wait=True) for _ in range(2)]
        monkeypatch.setenv("RAY_ADDRESS", nodes.address)
        with VirtualCluster(num_nodes=1, gpus_per_node=1) as joined:
            group = WorkerGroup(joined, HangingWorker)
            lost = joined.layout.nodes[0].node_id
            nodes.remove_node(next(node for node in workers if node.node_id == lost), allow_graceful=False)
            with pytest.raises(WorkerError, match="rank 0 of 1"):
                group.run_all(HangingWorker.pid)
            joined.renew()
            assert joined.layout.nodes[0].node_id != lost
            assert WorkerGroup(joined, HangingWorker).run_all(HangingWorker.pid)
    finally:
        nodes.shutdown()


@pytest.mark.sampled
@pytest.mark.slow
def test_a_joined_cluster_that_loses_its_head(cluster: VirtualCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray itself would end this process, after a minute."""
    cluster.shutdown()
    monkeypatch.setattr(head, "AWAY_S", 5)
    with without_gpus():
        nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        monkeypatch.setenv("RAY_ADDRESS", nodes.address)
        with VirtualCluster(num_nodes=1, gpus_per_node=1) as joined:
            group = WorkerGroup(joined, HangingWorker)
            assert group.run_all(HangingWorker.pid)
            nodes.head_node.kill_gcs_server()
            with pytest.raises(ResourceError, match=r"gcs_server at \S+ has not answered for \d+ s"):
                group.run_all(HangingWorker.die, rank=7)
    finally:
        nodes.shutdown()
