"""Memory that processes of this node or container can still take, and the part of it that offloading may."""

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.units import parse_bytes


def host_memory_budget_bytes(budget: float | str) -> int:
    """Bytes for this process: a size such as "32GiB" as it is, or a share of the node's free memory divided by the
    ranks on the node (`LOCAL_WORLD_SIZE`). Raises ConfigError for a share outside of (0, 1] and a text that is no size.
    """
    if isinstance(budget, str):
        return parse_bytes(budget)
    if not isinstance(budget, int | float) or not 0 < budget <= 1:
        raise ConfigError(
            f"host_memory_budget={budget!r}: write a share of the free memory in (0, 1] or a size like '32GiB'."
        )
    return int(free_host_bytes() * budget) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def free_host_bytes(root: Path = Path("/")) -> int:
    """The kernel's estimate of free memory, or what the memory cgroup leaves, whichever is less."""
    import psutil

    available_bytes = int(psutil.virtual_memory().available)
    cgroup = cgroup_memory(root)
    return available_bytes if cgroup is None else min(available_bytes, cgroup[0] - cgroup[1])


def cgroup_memory(root: Path = Path("/")) -> tuple[int, int] | None:
    """Limit and use in bytes of the memory cgroup, of version 1 or 2, that leaves this process least; None: no limit.

    File pages that the kernel can drop at once are not counted as used.
    """
    known = [
        limit
        for folder in cgroup_folders("memory", root)
        for files in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
        if (limit := _limit_and_use(folder, *files)) is not None
    ]
    return min(known, key=lambda limit: limit[0] - limit[1], default=None)


def cgroup_folders(controller: str, root: Path = Path("/")) -> Iterator[Path]:
    """Folders of this process's cgroups with such a controller ("memory", "cpu"), of both versions; some may not be."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        folder = root / "sys/fs/cgroup" / (controller if controllers else "")
        yield folder
        for part in path.split("/"):
            # A container shows its host's path, which does not exist inside: the mount itself is then its group.
            if part not in ("", ".."):
                folder /= part
                yield folder


def give_back_free_memory() -> None:
    """Return the free pages of this process's heap to the system, where the C library (glibc) can.

    It keeps them otherwise, between blocks that live longer: with batches of changing shapes a worker's memory grows
    in jumps for hundreds of steps, though nothing holds it.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _limit_and_use(folder: Path, limit_file: str, use_file: str) -> tuple[int, int] | None:
    try:
        limit_bytes, used_bytes = int((folder / limit_file).read_text()), int((folder / use_file).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no such group, or no limit ("max")
        return None
    droppable_bytes = int(stat.get("total_inactive_file", stat.get("inactive_file", "0")))
    unlimited = limit_bytes >= 1 << 60  # how version 1 says so
    return None if unlimited else (limit_bytes, max(0, used_bytes - droppable_bytes))
