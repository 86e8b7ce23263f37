"""What the engine did, in bytes and counts, since it was built."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class ModuleStats:
    """One module name over all its layers. `num_groups` counts commits that had something offloaded to bring
    back; bytes of a storage that several modules save belong to the first that committed it."""

    bytes_out: int = 0
    bytes_in: int = 0
    num_groups: int = 0


@dataclass(slots=True)
class OffloadStats:
    """Totals since the engine was built; the two `host` figures are of now and of the highest moment."""

    bytes_out: int = 0
    """Copied from the device to the host."""
    bytes_in: int = 0
    """Copied back; less than `bytes_out` when a graph was dropped without its backward."""
    host_bytes: int = 0
    """Now held in the arena, each block rounded up to 512 bytes: 0 when no graph is alive."""
    peak_host_bytes: int = 0
    """Highest `host_bytes`."""
    host_capacity_bytes: int = 0
    """Host memory taken from the system, in slabs."""
    denied_bytes: int = 0
    """Kept on the device because the host memory budget, or the system, had no room."""
    ineffective_bytes: int = 0
    """Copied out, but their source was still in device memory when the reload began, so nothing was gained:
    something else keeps it alive, or backward came before the copy had ended."""
    demand_reloads: int = 0
    """Reloads that began only when backward asked for the tensor."""
    per_module: dict[str, ModuleStats] = field(default_factory=dict)
