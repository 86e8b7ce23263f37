import ctypes
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Literal

import psutil
import pytest
import ray
from hypothesis import given, settings
from hypothesis import strategies as st
from ray._private import ray_constants

from nemo_rl_offload.cluster import virtual_cluster
from nemo_rl_offload.cluster.head import Head
from nemo_rl_offload.cluster.private_ray import PrivateRay
from nemo_rl_offload.cluster.signals import Held, exit_on_sigterm
from nemo_rl_offload.cluster.virtual_cluster import Layout, Node, VirtualCluster, _processes_of_ray, choose_layout
from nemo_rl_offload.errors import ResourceError


def cluster(*shapes: tuple[float, int]) -> list[Node]:
    return [Node(f"id{i}", f"10.0.0.{i}", cores, gpus) for i, (cores, gpus) in enumerate(shapes)]


@pytest.mark.parametrize(
    ("shapes", "num_nodes", "gpus_per_node", "device", "addresses", "workers"),
    [
        ([(2, 0)], 1, "auto", "cpu", ["10.0.0.0"], 1),
        ([(2, 0)], 1, 4, "cpu", ["10.0.0.0"], 4),
        ([(0, 0), (2, 0)], 1, "auto", "cpu", ["10.0.0.1"], 1),  # a head node that takes no work
        ([(8, 1)], 1, "auto", "cuda", ["10.0.0.0"], 1),
        ([(8, 0), (8, 4), (8, 8)], 2, "auto", "cuda", ["10.0.0.2", "10.0.0.1"], 4),
        ([(8, 0), (8, 4), (8, 8)], 1, "auto", "cuda", ["10.0.0.2"], 8),
        ([(8, 2), (8, 2)], 2, 1, "cuda", ["10.0.0.0", "10.0.0.1"], 1),
    ],
)
def test_layout(
    shapes: list[tuple[float, int]],
    num_nodes: int,
    gpus_per_node: int | Literal["auto"],
    device: str,
    addresses: list[str],
    workers: int,
) -> None:
    layout = choose_layout(cluster(*shapes), num_nodes, gpus_per_node)
    assert (layout.device, layout.workers_per_node) == (device, workers)
    assert [node.address for node in layout.nodes] == addresses


@pytest.mark.parametrize(
    ("shapes", "num_nodes", "gpus_per_node", "message"),
    [
        ([(2, 0)], 2, "auto", r"2 node\(s\) with at least one core are needed, 1 of 1 qualify"),
        ([(8, 4), (8, 0)], 1, 8, r"1 node\(s\) with 8 or more GPUs .* 0 of 2 .*10\.0\.0\.0: 4 GPUs, 8 cores"),
        ([(8, 4), (8, 0)], 2, "auto", r"2 node\(s\) with 1 or more GPUs are needed, 1 of 2 qualify"),
    ],
)
def test_too_small(
    shapes: list[tuple[float, int]], num_nodes: int, gpus_per_node: int | Literal["auto"], message: str
) -> None:
    with pytest.raises(ResourceError, match=message) as caught:
        choose_layout(cluster(*shapes), num_nodes, gpus_per_node)
    assert f"cluster.num_nodes={num_nodes}" in str(caught.value)
    assert f"cluster.gpus_per_node={gpus_per_node}" in str(caught.value)


SHAPES = st.lists(st.tuples(st.integers(0, 128).map(float), st.integers(0, 8)), min_size=1, max_size=5)


@settings(max_examples=200, deadline=None)
@given(shapes=SHAPES, num_nodes=st.integers(1, 4), gpus_per_node=st.just("auto") | st.integers(1, 16))
def test_slots_fit_and_leave_cores(
    shapes: list[tuple[float, int]], num_nodes: int, gpus_per_node: int | Literal["auto"]
) -> None:
    try:
        layout = choose_layout(cluster(*shapes), num_nodes, gpus_per_node)
    except ResourceError:
        return
    workers = layout.workers_per_node
    ranks = [layout.node_of(rank) for rank in range(num_nodes * workers)]
    assert [ranks.count(node) for node in layout.nodes] == [workers] * num_nodes
    for node in layout.nodes:
        slot = layout.slot(node)
        assert slot  # Ray refuses an empty bundle
        assert all(amount > 0 for amount in slot.values())
        assert workers * slot.get("CPU", 0) <= node.num_cores / 2
        assert workers * slot.get("GPU", 0) <= node.num_gpus
        assert ("GPU" in slot) == (layout.device == "cuda") == any(gpus for _, gpus in shapes)


@given(num_nodes=st.integers(1, 5), per_node=st.integers(1, 8), nodes=st.integers(1, 5), workers=st.integers(1, 8))
def test_a_split_gives_every_slot_to_one_part(num_nodes: int, per_node: int, nodes: int, workers: int) -> None:
    whole = VirtualCluster.__new__(VirtualCluster)  # its constructor starts Ray
    whole.layout = Layout("cuda", tuple(cluster(*[(16, per_node)] * num_nodes)), per_node)
    whole.workers_per_node = per_node
    whole.placement_groups = tuple(f"group of {node.address}" for node in whole.layout.nodes)  # type: ignore[misc]
    is_possible = nodes < num_nodes if num_nodes > 1 else workers < per_node
    if not is_possible:
        with pytest.raises(ResourceError, match=r"none of .* to train"):
            whole.split(nodes, workers)
        return
    first, last = whole.split(nodes, workers)
    assert last.world_size == (nodes * per_node if num_nodes > 1 else workers)
    slots = [part.slot_of(rank) for part in (first, last) for rank in range(part.world_size)]
    every = [whole.whole().slot_of(rank) for rank in range(num_nodes * per_node)]
    assert slots == every
    assert len(set(every)) == num_nodes * per_node
    for part in (first, last, whole.whole()):
        for rank in range(part.world_size):
            assert part.slot_of(rank)[0] == f"group of {part.node_of(rank).address}"


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.0.0.1:port"])
def test_address_without_a_cluster(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ResourceError, match=f"RAY_ADDRESS={address}: .*RAY_AUTH_MODE=token"):
        VirtualCluster(1, "auto")


def test_auto_where_the_last_cluster_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray._private.services.find_gcs_addresses", cache(set))
    monkeypatch.setattr("ray._private.services.find_bootstrap_address", lambda _folder: "127.0.0.1:1")
    monkeypatch.setattr("ray.init", lambda **_: pytest.fail("Ray would try for minutes"))
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    with pytest.raises(ResourceError, match=r"RAY_ADDRESS=auto: .*refused"):
        VirtualCluster(1, "auto")


@pytest.mark.parametrize(
    ("errors", "num_tries", "is_up"),
    [
        (["The current node timed out during startup."], 2, True),
        (["The current node timed out during startup."] * 2, 2, False),
        (["no space left"], 1, False),
    ],
)
def test_ray_gets_a_second_chance_on_a_busy_machine(
    errors: list[str], num_tries: int, is_up: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tries: list[str] = []

    def init(address: str, **_: object) -> None:
        tries.append(address)
        if len(tries) <= len(errors):
            raise Exception(errors[len(tries) - 1])

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "kept from the environment of this process")
    monkeypatch.setattr(virtual_cluster.ray, "init", init)
    monkeypatch.setattr(virtual_cluster.signal, "signal", lambda *_: None)
    with nullcontext() if is_up else pytest.raises(ResourceError, match=errors[-1]):
        private_ray = PrivateRay(tmp_path)
        try:
            virtual_cluster._connect(private_ray)
        finally:
            private_ray.close(keep=False)
    assert tries == ["local"] * num_tries
    assert ray_constants.ENABLE_RAY_CLUSTER  # for one that is joined later
    assert not list(tmp_path.iterdir())


def test_signals_wait_until_ray_has_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On the way Ray's C++ part sets SIGTERM to its default, past Python; here, so that it is lost."""
    libc, ignore, ended = ctypes.CDLL(None), ctypes.c_void_p(1), list[str]()

    def shutdown(**_: bool) -> None:
        libc.signal(signal.SIGTERM, ignore)
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)
        ended.append("Ray")

    whole = VirtualCluster.__new__(VirtualCluster)  # its constructor starts Ray
    whole.placement_groups, whole.head, whole._connected_here = (), Head(), True
    whole._private_ray = PrivateRay(tmp_path)
    monkeypatch.setattr(virtual_cluster.ray, "shutdown", shutdown)
    before = signal.signal(signal.SIGTERM, exit_on_sigterm)
    try:
        with pytest.raises(SystemExit):
            whole.shutdown()
        assert signal.getsignal(signal.SIGTERM) is exit_on_sigterm
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended == ["Ray"]
    assert not list(tmp_path.iterdir())


def test_an_exception_as_ray_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def shutdown(**_: bool) -> None:
        raise ValueError("Ray's own words")

    monkeypatch.setattr(virtual_cluster.ray, "shutdown", shutdown)
    with pytest.raises(ValueError, match="own words"), Held("the end") as held:
        virtual_cluster._shut_ray_down(held)


def test_a_programs_own_processes_are_not_taken_for_rays() -> None:
    """A fork server's command has the path in which modules are looked for, and with it folders of Ray."""
    folder = Path(ray.__file__).parent
    waits = [sys.executable, "-c", "import time; time.sleep(60)"]
    own = [f"main(sys_path=['{folder}/thirdparty_files'])", "/home/ray/program.py", "ray"]
    of_ray = [f"{folder}/dashboard/agent.py", "ray::IDLE"]
    started = {argument: subprocess.Popen([*waits, argument]) for argument in (*own, *of_ray)}
    try:
        for argument, process in started.items():
            while psutil.Process(process.pid).cmdline()[-1:] != [argument]:  # soon after it has begun
                time.sleep(0.01)
        pids = {process.pid for process in _processes_of_ray()}
        assert [argument for argument, process in started.items() if process.pid in pids] == of_ray
    finally:
        for process in started.values():
            process.kill()
            process.wait()


@pytest.mark.parametrize("num_gpus", [0, 8])
@pytest.mark.parametrize(("returns_after", "is_private"), [(3, False), (1000, False), (3, True)])
def test_a_lost_node_may_come_back(
    returns_after: int, is_private: bool, num_gpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To a Ray that was joined, for so long; a private Ray has one node, and is started anew."""
    before, asked, now_s = cluster((4, 0), (4, 0), (2, num_gpus)), 0, 0.0
    num_nodes = 1 if num_gpus else 3

    def alive() -> list[Node]:
        nonlocal asked
        asked += 1
        return before if asked > returns_after else before[:2]

    def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    monkeypatch.setattr(virtual_cluster, "_alive_nodes", alive)
    monkeypatch.setattr(virtual_cluster.time, "sleep", sleep)
    monkeypatch.setattr(virtual_cluster.time, "monotonic", lambda: now_s)
    monkeypatch.setattr(VirtualCluster, "_reserve", lambda _: True)
    monkeypatch.setattr(VirtualCluster, "is_private", is_private)
    joined = VirtualCluster.__new__(VirtualCluster)
    joined.head, joined.placement_groups, joined._private_ray = Head(), (), None
    joined.layout, joined.workers_per_node = choose_layout(before, num_nodes, 1), 1
    joined.device = joined.layout.device
    if is_private or returns_after > virtual_cluster.RETURN_S:
        with pytest.raises(ResourceError, match=r"of 2 qualify" if is_private else r"None came within 0:10:00\."):
            joined.renew()
        assert asked == 1 or now_s == virtual_cluster.RETURN_S
    else:
        joined.renew()
        assert (asked, joined.world_size) == (returns_after + 1, num_nodes)
        assert joined.device == ("cuda" if num_gpus else "cpu"), "as before, though others are there"


def test_nobody_waits_for_a_node_of_a_ray_without_head(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(_: object) -> list[Node]:
        raise ResourceError("gcs_server has not answered")

    joined = VirtualCluster.__new__(VirtualCluster)
    joined.head, joined.placement_groups, joined._private_ray = Head(), (), None
    joined.layout, joined.workers_per_node, joined.device = choose_layout(cluster((2, 0)), 1, 1), 1, "cpu"
    monkeypatch.setattr(Head, "ask", lambda _, call: lost(call))
    with pytest.raises(ResourceError, match=r"^gcs_server has not answered$"):
        joined.renew()
