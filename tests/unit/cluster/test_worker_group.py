import importlib.util
import os
import socket
from pathlib import Path

import pytest

from nemo_rl_offload.cluster.worker_group import Failure, RankActor, _own_import_paths, _to_error
from nemo_rl_offload.errors import ConfigError, NemoRLOffloadError, ResourceError, WorkerError


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
    monkeypatch.setenv("MASTER_PORT", "unset")


def test_actor_runs_the_workers_methods() -> None:
    actor = RankActor()
    assert actor.construct(500, Worker, (10,), {}) is None
    assert actor.call("add", (2,), {"right": 4}) == 518


def test_actor_offers_a_port_that_can_be_bound() -> None:
    place = RankActor().locate()
    with socket.socket() as server:
        server.bind(("", place.free_port))
    assert place.pid == os.getpid()


def test_exception_becomes_text_with_rank_and_traceback() -> None:
    actor = RankActor()
    actor.construct(500, Worker, (10,), {})
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
    failure = RankActor().construct(500, Worker, (10, raised), {})
    assert failure is not None
    error = _to_error(failure, "rank 3 of 4")
    assert type(error) is type(raised)
    assert str(error) == message


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
