"""Folders of Ray: which are removed, and which stay."""

import fcntl
import os
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from patience import PATIENCE_S

from nemo_rl_offload.cluster import private_ray
from nemo_rl_offload.cluster.private_ray import NUM_KEPT, PREFIX, PrivateRay, remove_old
from nemo_rl_offload.errors import WorkerError

NUM_OLD = NUM_KEPT + 2


@pytest.fixture
def old(tmp_path: Path) -> list[Path]:
    """Folders of runs that have ended, the oldest first."""
    folders = [tmp_path / f"{PREFIX}{i}" for i in range(NUM_OLD)]
    for i, folder in enumerate(folders):
        (folder / "ray/session/logs").mkdir(parents=True)
        (folder / "lock").touch()
        os.utime(folder, (i, i))
    return folders


def test_the_newest_folders_stay(old: list[Path], tmp_path: Path) -> None:
    remove_old(tmp_path)
    assert sorted(tmp_path.iterdir()) == old[-NUM_KEPT:]


@pytest.fixture
def held(old: list[Path]) -> Iterator[int]:
    lock = os.open(old[0] / "lock", os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    yield lock
    os.close(lock)


@pytest.mark.usefixtures("held")
def test_a_folder_in_use_stays(old: list[Path], tmp_path: Path) -> None:
    remove_old(tmp_path)
    assert sorted(tmp_path.iterdir()) == [old[0], *old[-NUM_KEPT:]]


@pytest.mark.parametrize("kind", ["another user's", "link", "other name", "being made", "file"])
def test_what_is_not_ours_stays(kind: str, old: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "file").touch()
    target = old[0]
    if kind == "another user's":
        monkeypatch.setattr(private_ray.os, "getuid", lambda: os.geteuid() + 1)
    elif kind == "other name":
        target = old[0].rename(tmp_path / "session_2026")
    elif kind == "being made":
        (old[0] / "lock").unlink()
    else:
        target = old[0].rename(tmp_path / "moved")
        old[0].symlink_to(other) if kind == "link" else old[0].touch()
    if kind == "being made":
        os.utime(target)
    remove_old(tmp_path)
    assert target.exists()
    assert (other / "file").exists()


def test_a_folder_without_a_lock_is_removed_when_it_is_old(old: list[Path], tmp_path: Path) -> None:
    (old[0] / "lock").unlink()
    os.utime(old[0], (0, 0))
    remove_old(tmp_path)
    assert not old[0].exists()


@pytest.mark.parametrize("keep", [True, False])
def test_a_folder_of_the_users_own(keep: bool, tmp_path: Path) -> None:
    ray = PrivateRay(tmp_path / "not" / "there")
    try:
        assert stat.S_IMODE(ray.folder.stat().st_mode) == 0o700
        for _ in range(NUM_OLD):
            remove_old(ray.folder.parent)
        assert ray._watchdog.poll() is None
    finally:
        ray.close(keep=keep)
    ray.close(keep=keep)
    assert ray.folder.exists() == keep
    assert ray._watchdog.returncode is not None


def test_names_of_sockets_are_not_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("d" * 40)
    monkeypatch.setenv("TMPDIR", str(deep))
    ray = PrivateRay()
    try:
        assert ray.folder.parent == Path("/tmp")
        socket = ray.folder / "ray/session_2026-11-26_04-17-31_380327_1234567/sockets/plasma_store"
        assert len(str(socket)) <= 107
    finally:
        ray.close(keep=False)


@pytest.fixture
def ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PrivateRay]:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "kept from the environment of this process")
    ray = PrivateRay(tmp_path)
    yield ray
    ray.close(keep=False)


def test_a_process_that_ends_while_ray_starts(ray: PrivateRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray waits for it for a minute."""
    program, release = tmp_path / "gcs_server", threading.Event()
    program.write_text("#!/bin/sh\nexit 3\n")
    program.chmod(0o700)
    popen = private_ray.ray_services.ConsolePopen

    def init(**_: object) -> None:
        private_ray.ray_services.ConsolePopen([str(program)], env=None)
        release.wait(PATIENCE_S)

    monkeypatch.setattr(private_ray.ray, "init", init)
    try:
        with pytest.raises(WorkerError, match=r"Ray's process gcs_server \(pid \d+\), .* ended with code 3"):
            ray.start()
    finally:
        release.set()
    while private_ray.ray_services.ConsolePopen is not popen:
        time.sleep(0.01)


def test_the_thread_that_starts_rays_processes_stays(ray: PrivateRay, monkeypatch: pytest.MonkeyPatch) -> None:
    """With it they would end: the kernel is asked to see to that."""
    threads: list[threading.Thread] = []
    monkeypatch.setattr(private_ray.ray, "init", lambda **_: threads.append(threading.current_thread()))
    ray.start()
    threads[0].join(0.3)
    assert threads[0].is_alive()
    ray.close(keep=False)
    threads[0].join(PATIENCE_S)
    assert not threads[0].is_alive()


def test_no_port_is_the_one_that_another_ray_takes(ray: PrivateRay, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's own choice is fixed; a cluster that finds it taken refuses all jobs."""
    ports = []

    def init(**_: object) -> None:
        ports.append(private_ray.ray_parameter.RayParams().dashboard_agent_listen_port)

    monkeypatch.setattr(private_ray.ray, "init", init)
    ray.start()
    assert ports == [0]
    assert private_ray.ray_parameter.RayParams().dashboard_agent_listen_port > 0, "as before"
