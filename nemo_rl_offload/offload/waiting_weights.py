"""Weights that wait in host memory, and come to the device for a pass.

A run with a reference needs two sets of weights of one shape, one at a time. The set that is not in use stands in the
host arena, in pieces of `PIECE_BYTES`. For a pass, each piece changes places with the bytes on the device: it comes
into a scratch buffer on the one lane, the bytes in its place leave into its block on the other, and the device copies
the scratch buffer to where they were. A block is written only when it has been read, and a place only when it has been
left, which fences say; with `MAX_UNDER_WAY` pieces under way both lanes are busy. After the pass the same thing
happens again, and everything is where it was, bit for bit. So one copy of the weights on the host is enough, and
whatever holds an address (graphs, fused kernels, buffers of data parallelism) stays valid.

Where the caller knows of room on the device, the bytes that have to go stay there instead, beside the model: then only
one set crosses the link, one way, once.

Weights that never change (a teacher's) have no others in their place: their storages are empty in between, and get
memory for the pass. What training alone needs may likewise leave while another process has the device (`AwayTensors`).
It has changed when it leaves again, so it is copied both ways.

Parameters that are views of one buffer go as one range. Tied ones go once.

Rejected: a second set on the device, exchanged by pointers. It takes room that the largest models do not have, and
what has recorded addresses reads the old ones. Copies by parameter through pageable memory took 6 s for 1.5 B
parameters (H100), for 3 GB each way.

Limit: a process that is killed during a pass loses nothing on disk, but an error in the middle of the way back leaves
the device with a mixture; the caller's run has to end then.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, UntypedStorage

from nemo_rl_offload.offload.arena import ALIGNMENT_BYTES, HostArena, floor_power_of_two
from nemo_rl_offload.offload.backends.base import Block, Event, Extent

PIECE_BYTES = 32 << 20
MAX_UNDER_WAY = 4
"""Pieces, each with a scratch buffer on the device."""
MIN_SLAB_BYTES, MAX_SLAB_BYTES = 1 << 20, 256 << 20
MAX_GAP_BYTES = 64 << 10
"""Between two parameters of a buffer: what alignment leaves there goes with them."""

type _Change = tuple[UntypedStorage, Tensor, Event]
"""A place, what is to stand there, and when the place has been left."""


def covered_ranges(tensors: Iterable[Tensor]) -> Iterator[tuple[UntypedStorage, int, int]]:
    """The bytes that tensors of any number stand on, as (storage, begin, end): each once, and in an order that depends
    on the order of the tensors alone."""
    storages: dict[int, UntypedStorage] = {}
    ranges: dict[int, list[tuple[int, int]]] = {}
    for tensor in tensors:
        if tensor.numel() == 0:
            continue
        storage = tensor.untyped_storage()
        begin = int(tensor.storage_offset()) * tensor.itemsize
        extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        storages.setdefault(storage.data_ptr(), storage)
        ranges.setdefault(storage.data_ptr(), []).append((begin, begin + extent * tensor.itemsize))
    for address, storage in storages.items():
        begin, end = -1, -1
        for next_begin, next_end in sorted(ranges[address]):
            if end >= 0 and next_begin <= end + MAX_GAP_BYTES:
                end = max(end, next_end)
                continue
            if end >= 0:
                yield storage, begin, end
            begin, end = next_begin, next_end
        yield storage, begin, end


def _places(tensors: Sequence[Tensor]) -> list[UntypedStorage]:
    """The same in pieces, each a storage that shares the memory."""
    return [
        storage[start : min(start + PIECE_BYTES, end)]
        for storage, begin, end in covered_ranges(tensors)
        for start in range(begin, end, PIECE_BYTES)
    ]


def _hold(arena: HostArena, sizes: Sequence[int]) -> tuple[list[Block], list[Block]]:
    """A block of each size, one behind another in slabs of powers of two, as pinned memory comes; and the slabs. All or
    none.

    Raises MemoryError when the budget has no room, or the system refuses.
    """
    missing = sum(-(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for size in sizes)
    if missing > arena.free_bytes:
        arena.drop_unused()
    if missing > arena.free_bytes:
        raise MemoryError(f"{missing} bytes are needed, {arena.free_bytes} left")
    slabs: list[Block] = []
    try:
        while missing:
            size = missing if missing < MIN_SLAB_BYTES else min(floor_power_of_two(missing), MAX_SLAB_BYTES)
            slab = arena.hold(size)
            assert slab is not None, "there was room"
            slabs.append(slab)
            missing -= slab.num_bytes
    except MemoryError:
        for slab in slabs:
            arena.release(slab)
        raise
    extents = deque(extent for slab in slabs for extent in slab.pieces)
    return [_cut(extents, size) for size in sizes], slabs


def _cut(extents: deque[Extent], size: int) -> Block:
    """A block of the first bytes of what is left of slabs."""
    pieces: list[Extent] = []
    missing = -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    while missing:
        slab, number, offset, num_bytes = extents.popleft()
        taken = min(missing, num_bytes)
        pieces.append(Extent(slab, number, offset, taken))
        if taken < num_bytes:
            extents.appendleft(Extent(slab, number, offset + taken, num_bytes - taken))
        missing -= taken
    return Block(tuple(pieces), size)


class WaitingWeights:
    """The present values of `tensors`, all on the arena's device, held in the arena.

    Raises MemoryError when that has no room for them; then it holds none of them.
    """

    def __init__(self, arena: HostArena, tensors: Sequence[Tensor]) -> None:
        self._backend, self._tensors = arena.backend, tensors
        self._kept: dict[int, Tensor] = {}  # by number of the piece: what stood in its place
        self._exchanged: list[int] = []
        places = _places(tensors)
        held_before = arena.held_bytes
        self._blocks, self._slabs = _hold(arena, [place.nbytes() for place in places])
        self.num_bytes = arena.held_bytes - held_before
        """Host memory that they take."""
        for place, block in zip(places, self._blocks, strict=True):
            block.last_event = self._backend.copy_out([(place, block)])
        self._backend.synchronize()

    @contextmanager
    def in_place(self, room_bytes: int = 0) -> Iterator[None]:
        """These weights instead of the present ones within the block, however it ends.

        `room_bytes` of device memory may hold present ones meanwhile, beside `MAX_UNDER_WAY` pieces.
        """
        places = _places(self._tensors)
        assert [place.nbytes() for place in places] == [block.num_bytes for block in self._blocks], "weights moved"
        try:
            num_kept = min(room_bytes // PIECE_BYTES, len(places))
            self._take(places, num_kept, keeps=True)
            self._exchange(places, range(num_kept, len(places)), self._exchanged)
            yield
        finally:
            back, self._exchanged = self._exchanged, []
            self._exchange(places, back, [])
            for number, kept in self._kept.items():
                self._bytes(places[number]).copy_(kept)
            self._kept.clear()

    def _take(self, places: Sequence[UntypedStorage], num_pieces: int, *, keeps: bool) -> None:
        """Bring the first pieces to their places; with `keeps`, what stood there stays on the device."""
        under_way = deque[tuple[int, Tensor, Event]]()
        try:
            for number in range(num_pieces):
                (arrived,), event = self._backend.copy_in([self._blocks[number]], [])
                under_way.append((number, arrived, event))
                if len(under_way) == MAX_UNDER_WAY:
                    self._take_one(places, *under_way.popleft(), keeps)
            while under_way:
                self._take_one(places, *under_way.popleft(), keeps)
        finally:
            for _, _, event in under_way:
                self._backend.compute_wait(event)

    def _take_one(
        self, places: Sequence[UntypedStorage], number: int, arrived: Tensor, event: Event, keeps: bool
    ) -> None:
        self._backend.compute_wait(event)
        place = self._bytes(places[number])
        if keeps:
            self._kept[number] = place.clone()
        place.copy_(arrived)

    def _exchange(self, places: Sequence[UntypedStorage], numbers: Iterable[int], done: list[int]) -> None:
        """Let pieces and what stands in their places change places, and add to `done` those that have."""
        under_way = deque[_Change]()
        try:
            for number in numbers:
                place, block = places[number], self._blocks[number]
                (arrived,), event = self._backend.copy_in([block], [])
                block.fences = (event,)
                block.last_event = self._backend.copy_out([(place, block)])
                under_way.append((place, arrived, block.last_event))
                done.append(number)
                if len(under_way) == MAX_UNDER_WAY:
                    self._arrive(under_way.popleft())
        finally:
            while under_way:
                self._arrive(under_way.popleft())

    def _arrive(self, change: _Change) -> None:
        place, arrived, has_left = change
        self._backend.compute_wait(has_left)
        self._bytes(place).copy_(arrived)

    def _bytes(self, place: UntypedStorage) -> Tensor:
        return torch.empty(0, dtype=torch.uint8, device=self._backend.device).set_(place)


def _with_whole_storages(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Those whose storages no others use."""
    whole = {
        storage.data_ptr()
        for storage, begin, end in covered_ranges(tensors)
        if begin == 0 and end + MAX_GAP_BYTES >= storage.nbytes()
    }
    return [each for each in tensors if each.untyped_storage().data_ptr() in whole]


def _storages(tensors: Sequence[Tensor]) -> list[tuple[UntypedStorage, int]]:
    """Each once, with its bytes."""
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in tensors}
    return [(storage, storage.nbytes()) for storage in storages.values()]


class DepartingWeights(WaitingWeights):
    """The same of weights that never change, and are on the device within `on_device` alone.

    A storage that others use too stays there.
    """

    def __init__(self, arena: HostArena, tensors: Sequence[Tensor]) -> None:
        super().__init__(arena, _with_whole_storages(tensors))
        self._storages = _storages(self._tensors)
        self._leave()

    def _leave(self) -> None:
        for storage, _ in self._storages:
            storage.resize_(0)

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """The weights have memory on the device within the block, however it ends."""
        try:
            for storage, num_bytes in self._storages:
                storage.resize_(num_bytes)
            self._take(_places(self._tensors), len(self._blocks), keeps=False)
            yield
        finally:
            self._leave()


class AwayTensors(WaitingWeights):
    """Tensors on the arena's device that leave it for a while, and come back with the bits that they had.

    A storage that others use too stays there. Host memory that is taken once is kept for the next time.
    """

    def __init__(self, arena: HostArena) -> None:
        super().__init__(arena, [])
        self._arena = arena
        self._storages: list[tuple[UntypedStorage, int]] = []

    @property
    def are_away(self) -> bool:
        """Whether they have no memory on the device now."""
        return bool(self._storages)

    def leave(self, tensors: Sequence[Tensor]) -> None:
        """Free the device memory of these tensors. Raises MemoryError when the arena has no room; then they stay."""
        assert not self.are_away
        self._tensors = _with_whole_storages(tensors)
        places = _places(self._tensors)
        sizes = [place.nbytes() for place in places]
        if sizes != [block.num_bytes for block in self._blocks]:
            for slab in self._slabs:
                self._arena.release(slab)
            self._blocks, self._slabs, self.num_bytes = [], [], 0
            held_before = self._arena.held_bytes
            self._blocks, self._slabs = _hold(self._arena, sizes)
            self.num_bytes = self._arena.held_bytes - held_before
        for place, block in zip(places, self._blocks, strict=True):
            block.last_event = self._backend.copy_out([(place, block)])
        self._backend.synchronize()
        self._storages = _storages(self._tensors)
        for storage, _ in self._storages:
            storage.resize_(0)

    def come_back(self) -> None:
        """Give them memory again, with what they held, if they are away. An error on the way leaves them away."""
        if not self.are_away:
            return
        for storage, num_bytes in self._storages:
            storage.resize_(num_bytes)
        try:
            self._take(_places(self._tensors), len(self._blocks), keeps=False)
        except BaseException:
            for storage, _ in self._storages:
                storage.resize_(0)
            raise
        self._backend.synchronize()  # before their blocks are written again
        self._storages = []
