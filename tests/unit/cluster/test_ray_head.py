"""What becomes of calls when the process that would answer them is gone."""

import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest
from patience import PATIENCE_S, eventually

from nemo_rl_offload.cluster import head
from nemo_rl_offload.cluster.head import Head, JoinedHead, OwnHead
from nemo_rl_offload.errors import ResourceError, WorkerError


def start() -> "subprocess.Popen[bytes]":
    return subprocess.Popen(["sleep", "60"])


def test_a_call_that_is_stuck_when_a_process_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "LOOK_S", 0.02)
    processes = {"gcs_server": start(), "raylet": start()}
    watched, release = OwnHead(processes, "/logs"), threading.Event()
    try:
        assert watched.ask(lambda: 7) == 7
        assert not watched.is_lost
        threading.Timer(0.1, processes["raylet"].kill).start()
        message = rf"Ray's process raylet \(pid {processes['raylet'].pid}\).* killed by signal 9\. .* /logs/raylet\.out"
        with pytest.raises(WorkerError, match=message):
            watched.ask(lambda: release.wait(PATIENCE_S))
        assert watched.is_lost
        with pytest.raises(WorkerError):
            watched.ask(lambda: pytest.fail("asked in vain"))
    finally:
        release.set()
        for process in processes.values():
            process.kill()
            process.wait()


@pytest.mark.parametrize("words", ["[C] node.cc:7: Check failed: status.ok() Timed out waiting for file\n", None])
def test_a_process_that_ends_by_itself_is_not_blamed_on_memory(tmp_path: Path, words: str | None) -> None:
    if words is not None:
        (tmp_path / "raylet.out").write_text(f"before\n{words}    @ 0x7f frame\n")
    process = subprocess.Popen(["false"])
    process.wait()
    with pytest.raises(WorkerError) as caught:
        OwnHead({"raylet": process}, str(tmp_path)).check()
    said = str(caught.value)
    assert "ended with code 1" in said
    assert "memory" not in said
    assert ("It says: Check failed: status.ok() Timed out waiting for file A machine" in said) == (words is not None)


@pytest.mark.parametrize("death_s", [None, 0.0])
def test_an_exception_of_a_call(death_s: float | None) -> None:
    """A dead process is the reason, and what Ray raises then a consequence."""
    process = start()

    def fail() -> None:
        if death_s is not None:
            process.send_signal(signal.SIGTERM)
            process.wait()
        raise ValueError("Ray's own words")

    try:
        with pytest.raises(ValueError if death_s is None else WorkerError, match=r"words|signal 15"):
            OwnHead({"gcs_server": process}, "/logs").ask(fail)
    finally:
        process.kill()
        process.wait()


def test_a_joined_head_may_be_away_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "TRY_PERIOD_S", 0.05)
    monkeypatch.setattr(head, "AWAY_S", 0.6)
    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]
    joined = JoinedHead("127.0.0.1", port)
    try:
        for is_up in (True, False, True):  # it is restarted
            if is_up and server.fileno() < 0:
                server = socket.create_server(("127.0.0.1", port))
            if not is_up:
                server.close()
            time.sleep(0.3)
            joined.check()
        server.close()
        assert eventually(lambda: joined.is_lost)
        with pytest.raises(ResourceError, match=rf"gcs_server at 127\.0\.0\.1:{port} has not answered for "):
            joined.ask(lambda: None)
    finally:
        joined.close()
        server.close()


def test_nobody_watches_a_ray_of_others() -> None:
    assert Head().ask(lambda: 3) == 3
