"""What the kernel leaves a run on this machine: cores, room for Ray's objects, and whom it killed for want of memory.

Ray looks at the mount of the cgroups alone, not at the group of this process, and takes half a core for none.
"""

import os
from pathlib import Path

from nemo_rl_offload.offload.host_memory import cgroup_folders, cgroup_memory, free_host_bytes
from nemo_rl_offload.units import human_bytes

OBJECT_STORE_BYTES = 512 << 20  # Ray moves it to a file in /tmp where /dev/shm is smaller
MIN_OBJECT_STORE_BYTES = 80 << 20
"""Ray refuses less than 75 MiB."""


def available_cores(root: Path = Path("/")) -> int:
    """Whole cores, one at least, that this process may use: by its affinity, and by the quotas of its cgroups."""
    cores = float(len(os.sched_getaffinity(0)))
    for folder in cgroup_folders("cpu", root):
        quota = _quota_v2(folder) or _quota_v1(folder)
        if quota is not None:
            cores = min(cores, quota)
    return max(1, int(cores))


def object_store_bytes(root: Path = Path("/")) -> int:
    """Room for what workers and driver hand each other: an eighth of the free memory, where that is little."""
    return max(MIN_OBJECT_STORE_BYTES, min(OBJECT_STORE_BYTES, free_host_bytes(root) // 8))


def num_killed(root: Path = Path("/")) -> int:
    """How many processes of this process's cgroups the kernel has killed for want of memory; else, of the machine."""
    counts = [
        count
        for folder in cgroup_folders("memory", root)
        for name in ("memory.events", "memory.oom_control")
        if (count := _value_of(folder / name, "oom_kill")) is not None
    ]
    return max(counts) if counts else _value_of(root / "proc/vmstat", "oom_kill") or 0


def memory_in_words(root: Path = Path("/")) -> str:
    """Which memory was too little."""
    cgroup = cgroup_memory(root)
    return "of this machine" if cgroup is None else f"of its cgroup, which is limited to {human_bytes(cgroup[0])}"


def _quota_v2(folder: Path) -> float | None:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return int(quota) / int(period)
    except (OSError, ValueError):  # no such group, or no limit ("max")
        return None


def _quota_v1(folder: Path) -> float | None:
    try:
        quota, period = (int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
    except (OSError, ValueError):
        return None
    return quota / period if quota > 0 else None


def _value_of(file: Path, name: str) -> int | None:
    try:
        return int(dict(line.split() for line in file.read_text().splitlines())[name])
    except (OSError, ValueError, KeyError):
        return None
