"""What the engine did, in bytes, counts and milliseconds, since it was built."""

from dataclasses import dataclass, field

from nemo_rl_offload.units import human_bytes


@dataclass(slots=True)
class ModuleStats:
    """One module name over all its layers. `num_groups` counts commits that had something to offload; bytes of a
    storage that several modules save belong to the first that committed it."""

    bytes_out: int = 0
    bytes_in: int = 0
    denied_bytes: int = 0
    kept_bytes: int = 0
    small_bytes: int = 0
    """Saved, by every region that did so, in tensors below the smallest that is worth a copy."""
    num_groups: int = 0


@dataclass(slots=True)
class OffloadStats:
    """Totals since the engine was built; the two `host` figures are of now and of the highest moment. Times are those
    of steps that have ended and been read, and stay 0 on a CPU, where copies overlap with nothing."""

    bytes_out: int = 0
    """Copied from the device to the host."""
    bytes_in: int = 0
    """Copied back; less than `bytes_out` when a graph was dropped without its backward, or backward came so early
    that the source was still there."""
    host_bytes: int = 0
    """Now in the arena, each block rounded up to 512 bytes: 0 when no graph is alive."""
    peak_host_bytes: int = 0
    """Highest `host_bytes`."""
    host_capacity_bytes: int = 0
    """Host memory taken from the system, in slabs."""
    denied_bytes: int = 0
    """Kept on the device because the host memory budget, or the system, had no room."""
    kept_bytes: int = 0
    """Kept on the device by choice: backward follows too soon, compute would wait for the copy and the device has room,
    or a fraction, a plan or an ineffective copy said so."""
    ineffective_bytes: int = 0
    """Copied out, but something else still held their source when the reload began, so nothing was gained. The next
    passes leave such tensors where they are."""
    returned_bytes: int = 0
    """Copied out, but backward came before the source was let go: it was taken back as it was."""
    demand_reloads: int = 0
    """Reloads that began only when backward asked for the tensor."""
    stall_out_ms: float = 0.0
    """The compute stream waited for copies out, to bound the device memory that they hold."""
    stall_in_ms: float = 0.0
    """The compute stream waited for copies back."""
    copy_ms: float = 0.0
    """Time that copies took, both directions added."""
    per_module: dict[str, ModuleStats] = field(default_factory=dict)

    @property
    def overlap(self) -> float | None:
        """The share of copy time during which the compute stream did not wait; None where nothing was timed."""
        return None if self.copy_ms == 0 else max(0.0, 1 - (self.stall_out_ms + self.stall_in_ms) / self.copy_ms)

    def __str__(self) -> str:
        """A short table, of what is not 0."""
        modules = {
            f"  {name}": f"{human_bytes(each.bytes_out)} out, {human_bytes(each.bytes_in)} in"
            for name, each in self.per_module.items()
        }
        rows = {
            "offloaded": f"{human_bytes(self.bytes_out)} out, {human_bytes(self.bytes_in)} in",
            **modules,
            "host memory": f"{human_bytes(self.host_bytes)} now, {human_bytes(self.peak_host_bytes)} at most",
            **{
                name: human_bytes(size)
                for name, size in (
                    ("no room on the host", self.denied_bytes),
                    ("kept by choice", self.kept_bytes),
                    ("ineffective", self.ineffective_bytes),
                    ("taken back", self.returned_bytes),
                )
                if size
            },
        }
        if self.demand_reloads:
            rows["reloads on demand"] = str(self.demand_reloads)
        if (overlap := self.overlap) is not None:
            rows["waits for copies"] = f"{self.stall_out_ms:.1f} ms out, {self.stall_in_ms:.1f} ms in"
            rows["copies behind compute"] = f"{overlap:.1%}"
        width = max(map(len, rows))
        return "\n".join(f"{name:{width}}  {value}" for name, value in rows.items())
