"""Host memory for offloaded bytes: few large slabs, byte-addressed blocks, one budget.

Blocks are placed best fit at 512-byte-aligned offsets, and neighbors that are free become one. A block that fits
nowhere in one piece is cut into the largest free pieces, so that memory grows only when there is not enough of it,
never for want of a hole of the right size. A block that is given back waits as it is for the next tensor of its size,
which in training mostly comes, and costs no bookkeeping then; as soon as something does not fit, all that wait become
free extents. A pool keyed by tensor shape, the usual choice, never gives a shape's memory to another shape and so
grows with every new sequence length. Slabs are powers of two, because allocators of
pinned memory round up to one anyway. A free extent carries the events of the copies that may still touch it as
fences: the host never waits for them, the next owner's first copy does. Limit: slabs stay until `close`, or
until `drop_unused`.

What lives as long as the run (an optimizer's state, reference weights) is `hold`'s: a slab of its own, in one piece and
of its own size, which counts against the same budget. So tensors can be views of it, and what comes and goes every step
finds no long-lived blocks in its way.
"""

import warnings
from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Callable, Sequence

from nemo_rl_offload.offload.backends.base import Backend, Block, Event, Extent, HostSlab
from nemo_rl_offload.units import GIB

ALIGNMENT_BYTES = 512
MIN_SLAB_BYTES = 16 << 20
MAX_SLAB_BYTES = GIB
MAX_PIECES = 8  # each piece is a copy of its own
MAX_FENCES = 8  # of a free range, before the device is asked which have passed; asking takes longer than keeping one


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
        self._insert(slab, offset, size, self.pending(fences) if len(fences) > MAX_FENCES else fences)

    def largest(self, count: int) -> int:
        """Sum of the `count` largest ranges."""
        return sum(size for size, _, _ in self._by_size[-count:])

    def take(self, size: int, *, in_part: bool) -> tuple[int, int, int, tuple[Event, ...]] | None:
        """(slab, offset, size, fences) of `size` bytes cut from the smallest range that has them. Where none has: with
        `in_part` all of the largest range, else None; None when nothing is free."""
        position = bisect_left(self._by_size, (size, -1, -1))
        if position == len(self._by_size):
            if not in_part or position == 0:
                return None
            position -= 1
        found_size, slab, offset = self._by_size[position]
        size = min(size, found_size)
        fences = self.pending(self._remove(slab, offset, position)[1])
        if found_size > size:
            self._insert(slab, offset + size, found_size - size, fences)
        return slab, offset, size, fences

    def pending(self, fences: tuple[Event, ...]) -> tuple[Event, ...]:
        if len(fences) == 1:
            return () if self._done(fences[0]) else fences
        return tuple([fence for fence in dict.fromkeys(fences) if not self._done(fence)])

    def _insert(self, slab: int, offset: int, size: int, fences: tuple[Event, ...]) -> None:
        insort(self._by_size, (size, slab, offset))
        self._by_start[slab, offset] = size, fences
        self._start_by_end[slab, offset + size] = offset

    def _remove(self, slab: int, offset: int, position: int | None = None) -> tuple[int, tuple[Event, ...]]:
        size, fences = self._by_start.pop((slab, offset))
        del self._start_by_end[slab, offset + size]
        del self._by_size[bisect_left(self._by_size, (size, slab, offset)) if position is None else position]
        return size, fences


class HostArena:
    """Blocks of host memory from `backend`, in at most `budget_bytes` of slabs, which are added as needed."""

    def __init__(self, backend: Backend, budget_bytes: int) -> None:
        self._backend = backend
        self._budget_bytes = budget_bytes
        self._held: set[Block] = set()
        self._slabs: list[HostSlab] = []
        self._free = FreeExtents(backend.done)
        self._waiting: defaultdict[int, deque[Block]] = defaultdict(deque)  # by `num_bytes`; the oldest first
        self._is_closed = False
        self.capacity_bytes = 0
        """Of slabs, but for those of `hold`."""
        self.used_bytes = 0
        self.peak_bytes = 0
        self.held_bytes = 0

    @property
    def backend(self) -> Backend:
        """Whose host memory this is."""
        return self._backend

    @property
    def budget_bytes(self) -> int:
        """The most that may be taken; less than at the beginning where the system has refused more."""
        return self._budget_bytes

    @property
    def free_bytes(self) -> int:
        """What `hold` can still give."""
        return self._budget_bytes - self.capacity_bytes - self.held_bytes

    def hold(self, num_bytes: int) -> Block | None:
        """A block in one piece, of memory that nothing else shares, until `release`; None where the budget has no room.

        Raises MemoryError when the system refuses. Pinned memory is rounded up by its allocator: ask for a power of two
        or a little less.
        """
        assert num_bytes > 0
        assert not self._is_closed
        if num_bytes > self.free_bytes:
            return None
        slab = self._backend.allocate_host(num_bytes)
        block = Block((Extent(slab, -1, 0, num_bytes),), num_bytes)
        self._held.add(block)
        self.held_bytes += num_bytes
        return block

    def holds(self, address: int) -> bool:
        """Whether memory of `hold` is at this address."""
        return any(start <= address < start + size for block in self._held for start, size in block.parts)

    def reserve(self, num_bytes: int) -> Block | None:
        """A block of `num_bytes`, or None when neither the free memory nor the budget has room for it."""
        waiting = self._waiting.get(num_bytes)
        if waiting:
            block = waiting.popleft()
        elif (cut := self._cut(num_bytes)) is not None:
            block = cut
        else:
            return None
        self.used_bytes += block.reserved_bytes
        if self.used_bytes > self.peak_bytes:
            self.peak_bytes = self.used_bytes
        return block

    def _cut(self, num_bytes: int) -> Block | None:
        """A block of memory that is free, or new."""
        assert num_bytes > 0
        size = -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if size > self._budget_bytes - self.held_bytes - self.used_bytes:
            return None
        extent = self._free.take(size, in_part=False)
        if extent is None and self._waiting:
            self._free_waiting()
            extent = self._free.take(size, in_part=False)
        if extent is None:
            return self._cut_in_parts(num_bytes, size)
        index, offset, taken, fences = extent
        return Block((Extent(self._slabs[index], index, offset, taken),), num_bytes, fences)

    def _cut_in_parts(self, num_bytes: int, size: int) -> Block | None:
        while (available := self._free.largest(MAX_PIECES)) < size:
            if not self._add_slab(size - available):
                if self.capacity_bytes - self.used_bytes < size:
                    return None
                break
        pieces: list[Extent] = []
        fences: tuple[Event, ...] = ()
        while size:
            extent = self._free.take(size, in_part=True)
            assert extent is not None
            index, offset, taken, extent_fences = extent
            pieces.append(Extent(self._slabs[index], index, offset, taken))
            fences += extent_fences
            size -= taken
        return Block(tuple(pieces), num_bytes, tuple(dict.fromkeys(fences)))

    def release(self, block: Block) -> None:
        """Give a block back; its last copy becomes a fence of the next owner. One of `hold` goes back to the system
        with whoever uses it last: its copies must have ended."""
        if self._is_closed:
            return
        if block.last_event is not None:
            block.fences, block.last_event = (block.last_event,), None
        if block in self._held:
            self._held.remove(block)
            self.held_bytes -= block.num_bytes
            return
        self.used_bytes -= block.reserved_bytes
        self._waiting[block.num_bytes].append(block)

    def _free_waiting(self) -> None:
        for blocks in self._waiting.values():
            for block in blocks:
                for _, index, offset, size in block.pieces:
                    self._free.add(index, offset, size, block.fences)
        self._waiting.clear()

    def rebuild(self, used: Sequence[Block]) -> None:
        """Give everything back but the blocks in `used` and those of `hold`. No copy is under way."""
        if self._is_closed:
            return
        taken: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        for block in used:
            for _, number, offset, size in block.pieces:
                taken[number].append((offset, size))
        free = FreeExtents(self._backend.done)
        for number, slab in enumerate(self._slabs):
            end = 0
            for offset, size in [*sorted(taken[number]), (slab.num_bytes, 0)]:
                if offset > end:
                    free.add(number, end, offset - end)
                end = offset + size
        self._free, self._waiting = free, defaultdict(deque)
        self.capacity_bytes = sum(slab.num_bytes for slab in self._slabs)
        self.used_bytes = sum(block.reserved_bytes for block in used)

    def drop_unused(self) -> None:
        """Give back the slabs of `reserve` while none of their blocks is in use, so that `hold` can have the room."""
        if self.used_bytes or self._is_closed:
            return
        self._backend.synchronize()  # a former owner's last copy may be under way
        self._slabs.clear()
        self._free, self._waiting = FreeExtents(self._backend.done), defaultdict(deque)
        self.capacity_bytes = 0

    def close(self) -> None:
        """Drop every slab; a slab's memory goes back to the system with the last block that uses it."""
        self._is_closed = True
        self._slabs.clear()
        self._held.clear()
        self._waiting.clear()
        self._free = FreeExtents(self._backend.done)
        self.capacity_bytes = self.used_bytes = self.held_bytes = 0

    def _add_slab(self, missing_bytes: int) -> bool:
        """A slab is about 1/16 of what is there already: neither many of them nor much unused memory."""
        usual = min(max(floor_power_of_two(self.capacity_bytes // 16), MIN_SLAB_BYTES), MAX_SLAB_BYTES)
        remaining = floor_power_of_two(self.free_bytes)
        slab_bytes = min(max(floor_power_of_two(missing_bytes), usual), remaining)
        if slab_bytes < ALIGNMENT_BYTES:
            return False
        try:
            slab = self._backend.allocate_host(slab_bytes)
        except MemoryError as error:
            warnings.warn(f"Host memory for offloading stays at {self.capacity_bytes} bytes: {error}", stacklevel=2)
            self._budget_bytes = self.capacity_bytes + self.held_bytes
            return False
        self._slabs.append(slab)
        self.capacity_bytes += slab_bytes
        self._free.add(len(self._slabs) - 1, 0, slab_bytes)
        return True


def floor_power_of_two(value: int) -> int:
    """The largest that is not above; 0 for what is not positive."""
    return 1 << (value.bit_length() - 1) if value > 0 else 0
