"""Cores, memory and kills, as a recorded tree of cgroups has them."""

import os
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from nemo_rl_offload.cluster.limits import (
    MIN_OBJECT_STORE_BYTES,
    OBJECT_STORE_BYTES,
    available_cores,
    memory_in_words,
    num_killed,
    object_store_bytes,
)


def write(root: Path, lines: str, files: dict[str, str]) -> None:
    for name, text in {"proc/self/cgroup": lines, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


V2, V1 = "sys/fs/cgroup", "sys/fs/cgroup/cpu"


def v1(group: str, quota: int) -> dict[str, str]:
    return {f"{V1}{group}/cpu.cfs_quota_us": f"{quota}\n", f"{V1}{group}/cpu.cfs_period_us": "100000\n"}


@pytest.mark.parametrize(
    ("lines", "files", "expected"),
    [
        ("0::/\n", {}, 8),
        ("0::/job/step\n", {f"{V2}/job/cpu.max": "max 100000\n"}, 8),
        ("0::/job/step\n", {f"{V2}/job/cpu.max": "300000 100000\n", f"{V2}/job/step/cpu.max": "max 100000\n"}, 3),
        ("0::/job/step\n", {f"{V2}/job/cpu.max": "300000 100000\n", f"{V2}/job/step/cpu.max": "50000 50000\n"}, 1),
        ("0::/host/path\n", {f"{V2}/cpu.max": "250000 100000\n"}, 2),  # seen from within a container
        ("0::/\n", {f"{V2}/cpu.max": "50000 100000\n"}, 1),  # half a core
        ("0::/\n", {f"{V2}/cpu.max": "6400000 100000\n"}, 8),
        ("1:cpu,cpuacct:/a\n", v1("/a", 200000), 2),
        ("1:cpu:/a/b\n", {**v1("/a", 400000), **v1("/a/b", -1)}, 4),
        ("1:cpuset:/a\n", v1("/a", 200000), 8),
        ("0::/a\n", {f"{V2}/a/cpu.max": "nonsense"}, 8),
    ],
)
def test_cores(
    lines: str, files: dict[str, str], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    write(tmp_path, lines, files)
    assert available_cores(tmp_path) == expected


@pytest.mark.parametrize(
    ("limit", "expected"), [("max", OBJECT_STORE_BYTES), (2 << 30, 256 << 20), (300 << 20, MIN_OBJECT_STORE_BYTES)]
)
def test_the_object_store_follows_the_cgroup(
    limit: object, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=64 << 30))
    group = {f"{V2}/memory.max": f"{limit}\n", f"{V2}/memory.current": "0\n", f"{V2}/memory.stat": ""}
    write(tmp_path, "0::/job\n", group)
    assert object_store_bytes(tmp_path) == expected
    said = "of this machine" if limit == "max" else "of its cgroup, which is limited to "
    assert memory_in_words(tmp_path).startswith(said)


@pytest.mark.parametrize(
    ("lines", "files", "expected"),
    [
        ("0::/job\n", {f"{V2}/job/memory.events": "low 0\noom 4\noom_kill 3\n", "proc/vmstat": "oom_kill 9\n"}, 3),
        ("4:memory:/a\n", {"sys/fs/cgroup/memory/a/memory.oom_control": "under_oom 0\noom_kill 2\n"}, 2),
        ("0::/\n", {"proc/vmstat": "pgfault 1\noom_kill 9\n"}, 9),
        ("0::/\n", {}, 0),
    ],
)
def test_kills(lines: str, files: dict[str, str], expected: int, tmp_path: Path) -> None:
    write(tmp_path, lines, files)
    assert num_killed(tmp_path) == expected
