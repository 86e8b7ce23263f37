"""Free memory of a node whose cgroup is a recorded tree, and the share of it that one rank gets."""

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.offload import host_memory
from nemo_rl_offload.offload.host_memory import free_host_bytes, give_back_free_memory, host_memory_budget_bytes


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


@pytest.mark.parametrize(("ranks", "expected"), [(None, 500), ("1", 500), ("4", 125)])
def test_a_share_is_divided_by_the_ranks(ranks: str | None, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "free_host_bytes", lambda: 1000)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if ranks is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert host_memory_budget_bytes(0.5) == expected


def test_a_size_is_for_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert host_memory_budget_bytes("3MiB") == 3 << 20
    with pytest.raises(ConfigError, match="not a size"):
        host_memory_budget_bytes("much")


@pytest.mark.parametrize("share", [0.0, -0.5, 1.5, 32])
def test_a_share_is_more_than_nothing_and_at_most_all(share: float) -> None:
    with pytest.raises(ConfigError, match="'32GiB'"):
        host_memory_budget_bytes(share)


def test_free_memory_is_given_back() -> None:
    process = psutil.Process()
    blocks = [bytearray(32 << 10) for _ in range(2000)]
    lasting = blocks[::200]  # between which the others leave holes
    full_bytes = process.memory_info().rss
    del blocks
    give_back_free_memory()
    assert full_bytes - process.memory_info().rss > 40 << 20
    assert len(lasting) == 10
