"""Free memory of a node whose cgroup is a recorded tree."""

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from nemo_rl_offload.observability.host_memory import free_host_bytes


@pytest.mark.parametrize("group", ["", "system.slice/job_7"])
@pytest.mark.parametrize(
    ("limit", "used", "expected"),
    [(None, None, 1000), ("max\n", "5\n", 1000), ("900\n", "300\n", 600), ("9000\n", "300\n", 1000)],
)
def test_free_memory_respects_the_cgroup(
    limit: str | None, used: str | None, expected: int, group: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    folder = tmp_path / "sys/fs/cgroup" / group
    folder.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"0::/{group}\n")
    if limit is not None and used is not None:
        (folder / "memory.max").write_text(limit)
        (folder / "memory.current").write_text(used)
        (folder / "memory.stat").write_text("")
    assert free_host_bytes(tmp_path) == expected
