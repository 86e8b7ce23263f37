import importlib.util
import os
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from nemo_rl_offload.cluster import worker_group
from nemo_rl_offload.cluster.worker_group import Failure, Place, RankActor, WorkerGroup, _own_import_paths, _to_error
from nemo_rl_offload.errors import ConfigError, NemoRLOffloadError, ResourceError, WorkerError

MASTER = "127.0.0.1", 500


class Worker:
    def __init__(self, start: int, error: Exception | None = None) -> None:
        if error:
            raise error
        self.value = start + int(os.environ["MASTER_PORT"])

    def add(self, left: int, right: int) -> int:
        return self.value + left * right


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    for name in ("MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "unset")


def test_actor_runs_the_workers_methods() -> None:
    actor = RankActor()
    assert actor.construct(MASTER, Worker, (10,), {}) is None
    assert actor.call("add", (2,), {"right": 4}) == 518
    assert os.environ["MASTER_ADDR"] == "127.0.0.1"


def test_a_module_that_cannot_be_imported_ahead_is_an_error_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "imported_ahead.py").write_text("")
    (tmp_path / "broken_ahead.py").write_text("raise OSError('no such library')")
    actor = RankActor()
    for module in ("imported_ahead", "broken_ahead", "missing_ahead"):
        actor.preload(module)
    assert "imported_ahead" in sys.modules
    assert actor.construct(MASTER, Worker, (10,), {}) is None


def test_actor_offers_a_port_that_can_be_bound() -> None:
    place = RankActor().locate("lo", "192.0.2.1")
    assert isinstance(place, Place)
    with socket.socket() as server:
        server.bind(("127.0.0.1", place.free_port))
    assert (place.pid, place.address) == (os.getpid(), "127.0.0.1")


def test_an_interface_that_is_not_there() -> None:
    failure = RankActor().locate("loo", "127.0.0.1")
    assert isinstance(failure, Failure)
    assert failure.kind is ConfigError
    assert failure.message.startswith(f"cluster.bind: {socket.gethostname()} has no interface 'loo', only ")
    assert "Did you mean 'lo'?" in failure.message


def test_exception_becomes_text_with_rank_and_traceback() -> None:
    actor = RankActor()
    actor.construct(MASTER, Worker, (10,), {})
    failure = actor.call("add", (2,), {"right": None})
    assert isinstance(failure, Failure)
    assert failure.rank == 3
    assert failure.message.startswith("TypeError: unsupported operand")
    assert failure.details.startswith("Traceback")
    error = _to_error(failure, "rank 3 of 4 (10.0.0.1, pid 7)")
    assert type(error) is WorkerError
    assert str(error) == f"rank 3 of 4 (10.0.0.1, pid 7): {failure.message}"
    assert vars(error)["details"] == failure.details


@pytest.mark.parametrize(
    ("raised", "message"),
    [(ConfigError("a.b: wrong"), "a.b: wrong"), (ResourceError("/x is full"), "rank 3 of 4: /x is full")],
)
def test_errors_of_this_project_keep_their_type(raised: NemoRLOffloadError, message: str) -> None:
    failure = RankActor().construct(MASTER, Worker, (10, raised), {})
    assert failure is not None
    error = _to_error(failure, "rank 3 of 4")
    assert type(error) is type(raised)
    assert str(error) == message


@pytest.mark.parametrize(
    ("is_private", "num_killed", "message"),
    [
        (True, 5, "the kernel killed the process for want of memory of this machine. Raise that, or lower what "),
        (True, 4, "the process died. SYSTEM_ERROR"),
        (False, 5, "the process died. SYSTEM_ERROR"),  # another machine's
    ],
)
def test_a_death_for_want_of_memory(
    is_private: bool, num_killed: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_group, "num_killed", lambda: num_killed)
    monkeypatch.setattr(worker_group, "memory_in_words", lambda: "of this machine")
    group = WorkerGroup.__new__(WorkerGroup)  # its constructor starts processes
    group._slots = SimpleNamespace(cluster=SimpleNamespace(is_private=is_private))  # type: ignore[assignment]
    group._num_killed, group._places = 4, [Place(1, "/logs/1.err", "127.0.0.1", 1)]
    found = group._death(0, "SYSTEM_ERROR")
    assert found.startswith(message)
    assert found.endswith(" Its log: /logs/1.err")


def test_import_paths_hold_this_package_and_no_installation() -> None:
    import nemo_rl_offload

    paths = [Path(path) for path in _own_import_paths()]
    package_parent = Path(nemo_rl_offload.__file__).parents[1]
    assert package_parent in paths or "site-packages" in package_parent.parts
    installed = importlib.util.find_spec("torch")
    assert installed is not None
    assert installed.origin is not None
    assert not {Path(os.__file__).parent, Path(installed.origin).parents[1]}.intersection(paths)
    assert not [path for path in paths if path.name == "lib-dynload"]
