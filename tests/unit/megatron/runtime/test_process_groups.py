"""Workers that cannot meet say so; one alone meets nobody."""

import multiprocessing
import socket
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta

import psutil
import pytest
import torch
import torch.distributed as dist
from patience import PATIENCE_S
from torch.distributed.distributed_c10d import GroupMember

from nemo_rl_offload.errors import WorkerError
from nemo_rl_offload.megatron.runtime import rendezvous


@pytest.fixture
def taken_port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The port at which workers are to meet, and where something else listens."""
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        for name, value in {"RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
            monkeypatch.setenv(name, value)
        yield port


def test_a_port_that_is_taken(taken_port: int, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(rendezvous.dist, "is_initialized", lambda: False)
    before, GroupMember.WORLD = GroupMember.WORLD, None  # what other tests of this process have joined
    request.addfinalizer(lambda: setattr(GroupMember, "WORLD", before))
    message = rf"cannot meet at 127\.0\.0\.1:{taken_port}: .*Address already in use.*start the run again"
    with pytest.raises(WorkerError, match=message):
        rendezvous.join("gloo")


def test_workers_meet_where_only_they_can_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own rendezvous listens on every interface."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    here = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in here.items():
        monkeypatch.setenv(name, value)
    stores: list[tuple[object, ...]] = []

    def make_store(host: str, port: int, *rest: object, master_listen_fd: int) -> str:
        with socket.socket(fileno=master_listen_fd) as listener:
            stores.append((host, port, *rest, listener.getsockname()))
        return "store"

    monkeypatch.setattr(rendezvous.dist, "TCPStore", make_store)
    monkeypatch.setattr(
        rendezvous.dist, "init_process_group", lambda backend, **given: stores.append((given["store"],))
    )
    rendezvous.join("gloo")
    assert stores == [("127.0.0.1", port, 2, True, timedelta(minutes=30), ("127.0.0.1", port)), ("store",)]


@pytest.mark.parametrize(("rank", "expected"), [(0, ("0", 0)), (1, ("0", 1)), (2, ("1", 0)), (3, ("1", 1))])
def test_neighbours_make_a_group_of_their_own(
    monkeypatch: pytest.MonkeyPatch, rank: int, expected: tuple[str, int]
) -> None:
    here = {"RANK": str(rank), "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in here.items():
        monkeypatch.setenv(name, value)
    groups: list[tuple[str, int]] = []

    def init(backend: str, *, store: str, rank: int, world_size: int, timeout: timedelta) -> None:
        assert world_size == 2
        groups.append((store, rank))

    monkeypatch.setattr(rendezvous, "listen", lambda host, port: 0)
    monkeypatch.setattr(rendezvous.dist, "TCPStore", lambda *_, **__: "of all")
    monkeypatch.setattr(rendezvous.dist, "PrefixStore", lambda prefix, store: prefix)
    monkeypatch.setattr(rendezvous.dist, "init_process_group", init)
    rendezvous.join("gloo", 2)
    assert groups == [expected]


@pytest.mark.slow
@pytest.mark.usefixtures("taken_port")
def test_one_worker_needs_no_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    context = multiprocessing.get_context("spawn")  # a group of this process stays for other tests
    with ProcessPoolExecutor(1, context) as pool:
        assert pool.submit(_join_and_sum).result(timeout=PATIENCE_S) == 1


def _join_and_sum() -> float:
    rendezvous.join("gloo")
    ones = torch.ones(1)
    dist.all_reduce(ones)
    listeners = [each.laddr.ip for each in psutil.Process().net_connections("inet") if each.status == "LISTEN"]
    assert set(listeners) == {"127.0.0.1"}
    dist.destroy_process_group()
    return ones.item()
