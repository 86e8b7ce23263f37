"""Host memory for offloaded bytes: few large slabs, byte-addressed blocks, one budget.

Blocks are placed best fit at 512-byte-aligned offsets, and neighbors that are free become one. A pool keyed
by tensor shape, the usual choice, never gives a shape's memory to another shape and so grows with every new
sequence length; here the bytes of any length fit wherever there is room. Slabs are powers of two, because
allocators of pinned memory round up to one anyway. A free extent carries the events of the copies that may
still touch it as fences: the host never waits for them, the next owner's first copy does. Limit: slabs stay
until `close`; a block never spans two slabs.
"""

import warnings
from bisect import bisect_left, insort
from collections.abc import Callable

from nemo_rl_offload.offload.backends.base import Backend, Block, Event, HostSlab

ALIGNMENT_BYTES = 512
MIN_SLAB_BYTES = 16 << 20
MAX_SLAB_BYTES = 1 << 30


class FreeExtents:
    """Free byte ranges of numbered slabs, best fit, coalesced. Sizes and offsets are bytes; knows no memory.
    `done` tells which fences have passed and can be forgotten."""

    def __init__(self, done: Callable[[Event], bool]) -> None:
        self._done = done
        self._by_size: list[tuple[int, int, int]] = []  # (size, slab, offset), sorted
        self._by_start: dict[tuple[int, int], tuple[int, tuple[Event, ...]]] = {}  # (slab, offset): size, fences
        self._start_by_end: dict[tuple[int, int], int] = {}

    def add(self, slab: int, offset: int, size: int, fences: tuple[Event, ...] = ()) -> None:
        """Make a range free, joined with the free neighbors on both sides."""
        assert size > 0
        start = self._start_by_end.get((slab, offset))
        if start is not None:
            left_size, left_fences = self._remove(slab, start)
            offset, size, fences = start, size + left_size, left_fences + fences
        if (slab, offset + size) in self._by_start:
            right_size, right_fences = self._remove(slab, offset + size)
            size, fences = size + right_size, fences + right_fences
        self._insert(slab, offset, size, self._pending(fences))

    def take(self, size: int) -> tuple[int, int, tuple[Event, ...]] | None:
        """(slab, offset, fences) of `size` bytes cut from the smallest range that has them; None without
        one."""
        position = bisect_left(self._by_size, (size, -1, -1))
        if position == len(self._by_size):
            return None
        found_size, slab, offset = self._by_size[position]
        fences = self._pending(self._remove(slab, offset)[1])
        if found_size > size:
            self._insert(slab, offset + size, found_size - size, fences)
        return slab, offset, fences

    def _pending(self, fences: tuple[Event, ...]) -> tuple[Event, ...]:
        return tuple(fence for fence in dict.fromkeys(fences) if not self._done(fence))

    def _insert(self, slab: int, offset: int, size: int, fences: tuple[Event, ...]) -> None:
        insort(self._by_size, (size, slab, offset))
        self._by_start[slab, offset] = size, fences
        self._start_by_end[slab, offset + size] = offset

    def _remove(self, slab: int, offset: int) -> tuple[int, tuple[Event, ...]]:
        size, fences = self._by_start.pop((slab, offset))
        del self._start_by_end[slab, offset + size]
        del self._by_size[bisect_left(self._by_size, (size, slab, offset))]
        return size, fences


class HostArena:
    """Blocks of host memory from `backend`, in at most `budget_bytes` of slabs, which are added as needed."""

    def __init__(self, backend: Backend, budget_bytes: int) -> None:
        self._backend = backend
        self._budget_bytes = budget_bytes
        self._slabs: list[HostSlab] = []
        self._slab_index: dict[HostSlab, int] = {}
        self._free = FreeExtents(backend.done)
        self.capacity_bytes = 0
        self.used_bytes = 0
        self.peak_bytes = 0

    def reserve(self, num_bytes: int) -> Block | None:
        """A block of `num_bytes`, or None when neither the free memory nor the budget has room for it."""
        assert num_bytes > 0
        size = _aligned(num_bytes)
        extent = self._free.take(size)
        if extent is None and self._add_slab(size):
            extent = self._free.take(size)
        if extent is None:
            return None
        self.used_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        slab, offset, fences = extent
        return Block(self._slabs[slab], offset, num_bytes, fences)

    def release(self, block: Block) -> None:
        """Give a block back; its last copy becomes a fence of the next owner."""
        size = _aligned(block.num_bytes)
        self.used_bytes -= size
        fences = block.fences if block.last_event is None else (block.last_event,)
        self._free.add(self._slab_index[block.slab], block.offset, size, fences)

    def close(self) -> None:
        """Drop every slab; a slab's memory goes back to the system with the last block that uses it."""
        self._slabs.clear()
        self._slab_index.clear()
        self._free = FreeExtents(self._backend.done)
        self.capacity_bytes = self.used_bytes = 0

    def _add_slab(self, size: int) -> bool:
        """A slab is about 1/16 of what is there already: neither many of them nor much unused memory."""
        usual = min(max(_floor_power_of_two(self.capacity_bytes // 16), MIN_SLAB_BYTES), MAX_SLAB_BYTES)
        remaining = self._budget_bytes - self.capacity_bytes
        slab_bytes = min(max(_ceil_power_of_two(size), usual), _floor_power_of_two(remaining))
        if slab_bytes < size:
            return False
        try:
            slab = self._backend.allocate_host(slab_bytes)
        except MemoryError as error:
            warnings.warn(f"Host memory for offloading stays at {self.capacity_bytes} bytes: {error}", stacklevel=2)
            self._budget_bytes = self.capacity_bytes
            return False
        self._slab_index[slab] = len(self._slabs)
        self._slabs.append(slab)
        self.capacity_bytes += slab_bytes
        self._free.add(self._slab_index[slab], 0, slab_bytes)
        return True


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _floor_power_of_two(value: int) -> int:
    return 1 << (value.bit_length() - 1) if value > 0 else 0


def _ceil_power_of_two(value: int) -> int:
    return 1 << (value - 1).bit_length()
