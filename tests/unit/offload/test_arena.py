"""The arena against a byte map, and its promises about budget, fences and refusal."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef

from nemo_rl_offload.offload import arena as arena_module
from nemo_rl_offload.offload.arena import FreeExtents, HostArena
from nemo_rl_offload.offload.backends.base import Block, Event, HostSlab
from nemo_rl_offload.offload.backends.host import HostBackend


class PendingBackend(HostBackend):
    """Events are names; those in `pending` have not completed."""

    def __init__(self) -> None:
        self.pending: set[Event] = set()

    def done(self, event: Event) -> bool:
        return event not in self.pending


class RefusingBackend(HostBackend):
    def allocate_host(self, num_bytes: int) -> HostSlab:
        raise MemoryError("refused")


def free_runs(used: list[bool]) -> list[tuple[int, int]]:
    """(size, offset) of each maximal run of free units."""
    runs, start = [], None
    for position, taken in enumerate([*used, True]):
        if taken and start is not None:
            runs.append((position - start, start))
            start = None
        elif not taken and start is None:
            start = position
    return runs


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(st.integers(1, 24), st.integers(-50, -1)), max_size=60))
def test_extents_are_best_fit_and_coalesced(operations: list[int]) -> None:
    """A positive number takes units, a negative one gives a range back; a bool map is the reference."""
    maps = [[False] * 40, [False] * 24]
    extents = FreeExtents(lambda event: True)
    for slab, units in enumerate(maps):
        extents.add(slab, 0, len(units))
    live: list[tuple[int, int, int]] = []
    for operation in operations:
        if operation < 0:
            if live:
                slab, offset, size = live.pop(operation % len(live))
                extents.add(slab, offset, size)
                maps[slab][offset : offset + size] = [False] * size
            continue
        free = [(size, slab, offset) for slab in range(2) for size, offset in free_runs(maps[slab])]
        fits = [run for run in free if run[0] >= operation]
        if not fits:
            assert extents.take(operation, in_part=False) is None
        taken = extents.take(operation, in_part=not fits)
        if not free:
            assert taken is None
            continue
        assert taken is not None
        slab, offset, size, fences = taken
        assert fences == ()
        assert (slab, offset) == (min(fits) if fits else max(free))[1:]
        assert size == (operation if fits else max(free)[0])
        maps[slab][offset : offset + size] = [True] * size
        live.append((slab, offset, size))
        assert extents.largest(2) == sum(sorted(run[0] for m in maps for run in free_runs(m))[-2:])


def write(block: Block, value: int) -> None:
    for host, device in block.views(torch.full((block.num_bytes,), value, dtype=torch.uint8)):
        host.copy_(device)


def holds(block: Block, value: int) -> bool:
    out = torch.full((block.num_bytes,), 255, dtype=torch.uint8)
    for host, device in block.views(out):
        device.copy_(host)
    return bool((out == value).all())


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 3000), st.booleans()), max_size=50))
def test_blocks_never_overlap_and_stay_in_the_budget(requests: list[tuple[int, bool]]) -> None:
    budget_bytes = 1 << 15
    arena = HostArena(HostBackend(), budget_bytes)
    blocks = []
    for number, (num_bytes, give_back) in enumerate(requests):
        block = arena.reserve(num_bytes)
        if block is not None:
            assert all(piece.offset % 512 == 0 for piece in block.pieces)
            write(block, number % 251)
            blocks.append((block, number % 251))
        if give_back and blocks:
            gone, value = blocks.pop(number % len(blocks))
            assert holds(gone, value)
            arena.release(gone)
        assert arena.capacity_bytes <= budget_bytes
        assert arena.used_bytes == sum(-(-each.num_bytes // 512) * 512 for each, _ in blocks)
    for block, value in blocks:
        assert holds(block, value)
        arena.release(block)
    assert arena.used_bytes == 0
    assert arena.peak_bytes <= arena.capacity_bytes


def test_a_new_owner_waits_for_the_last_copies_of_the_former_ones() -> None:
    backend = PendingBackend()
    arena = HostArena(backend, 1024)
    first, second = arena.reserve(512), arena.reserve(512)
    assert first is not None
    assert second is not None
    first.last_event, second.last_event = "first", "second"
    backend.pending = {"first", "second"}
    arena.release(first)
    arena.release(second)
    backend.pending = {"second"}
    both = arena.reserve(1024)
    assert both is not None
    assert both.fences == ("second",)
    arena.release(both)  # nothing was copied: its fences stay
    again = arena.reserve(100)
    assert again is not None
    assert again.fences == ("second",)


def test_a_block_given_back_goes_to_the_next_tensor_of_its_size() -> None:
    backend = PendingBackend()
    arena = HostArena(backend, 64 << 20)
    older, newer = arena.reserve(700), arena.reserve(700)
    assert older is not None
    assert newer is not None
    older.last_event, newer.last_event = "older", "newer"
    arena.release(older)
    arena.release(newer)
    backend.pending = {"newer"}
    assert arena.reserve(700) is older  # its copy is the likeliest to have ended
    assert older.fences == ("older",)
    assert arena.reserve(700) is newer
    assert newer.fences == ("newer",)
    assert newer.last_event is None
    other = arena.reserve(701)
    assert other is not None
    assert other.pieces[0].offset not in (older.pieces[0].offset, newer.pieces[0].offset)


def test_blocks_that_wait_make_room_before_memory_grows() -> None:
    arena = HostArena(HostBackend(), 1 << 30)
    blocks = [arena.reserve(1 << 20) for _ in range(16)]
    for block in blocks:
        assert block is not None
        arena.release(block)
    whole = arena.reserve(16 << 20)
    assert whole is not None
    assert len(whole.pieces) == 1
    assert arena.capacity_bytes == 16 << 20
    again = arena.reserve(1 << 20)  # none of the sixteen is left
    assert again is not None
    assert again.pieces[0].number == 1


def test_slabs_are_powers_of_two_and_grow_with_the_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "MIN_SLAB_BYTES", 1 << 10)
    monkeypatch.setattr(arena_module, "MAX_SLAB_BYTES", 1 << 13)
    sizes: list[int] = []

    class Recording(HostBackend):
        def allocate_host(self, num_bytes: int) -> HostSlab:
            sizes.append(num_bytes)
            return super().allocate_host(num_bytes)

    arena = HostArena(Recording(), 1 << 18)
    while arena.reserve(600) is not None:
        pass
    assert all(size & (size - 1) == 0 for size in sizes)
    assert sizes[0] == 1 << 10
    assert max(sizes) == 1 << 13
    assert arena.capacity_bytes == 1 << 18


def test_refused_memory_is_a_warning_and_a_denial() -> None:
    arena = HostArena(RefusingBackend(), 1 << 20)
    with pytest.warns(UserWarning, match="refused"):
        assert arena.reserve(1000) is None
    assert arena.reserve(1000) is None  # asked no more, warned no more
    with pytest.raises(MemoryError, match="bytes of host memory"):
        HostBackend().allocate_host(1 << 60)


def test_a_block_takes_several_pieces_rather_than_more_memory() -> None:
    arena = HostArena(HostBackend(), 64 << 20)
    block = arena.reserve((17 << 20) + 1)
    assert block is not None
    assert len(block.pieces) == 2
    assert arena.capacity_bytes == 32 << 20
    write(block, 7)
    other = arena.reserve(14 << 20)
    assert other is not None
    arena.release(block)
    scattered = arena.reserve(17 << 20)
    assert scattered is not None
    write(scattered, 3)
    write(other, 5)
    assert holds(scattered, 3)
    assert arena.capacity_bytes == 32 << 20


def test_closing_gives_the_memory_of_unused_blocks_back() -> None:
    arena = HostArena(HostBackend(), 64 << 20)
    block = arena.reserve(700)
    assert block is not None
    slab = StorageWeakRef(block.pieces[0].slab.data.untyped_storage())
    arena.release(block)
    del block
    assert not slab.expired()
    arena.close()
    assert slab.expired()


def test_a_block_that_was_cut_waits_for_its_size_until_something_else_does_not_fit() -> None:
    arena = HostArena(HostBackend(), 64 << 20)
    left, middle, right = (arena.reserve(size << 20) for size in (6, 4, 6))
    assert left is not None
    assert middle is not None
    assert right is not None
    arena.release(left)
    arena.release(right)
    cut = arena.reserve(8 << 20)
    assert cut is not None
    assert len(cut.pieces) == 2
    arena.release(middle)
    arena.release(cut)
    assert arena.reserve(8 << 20) is cut
    arena.release(cut)
    whole = arena.reserve(12 << 20)
    assert whole is not None
    assert len(whole.pieces) == 1
    assert arena.capacity_bytes == 16 << 20


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 1 << 30))
def test_random_lengths_take_no_more_than_the_largest_step_and_a_slab(seed: int) -> None:
    chance = random.Random(seed)
    arena = HostArena(UnbackedBackend(), 1 << 50)
    largest = 0
    for _ in range(100):
        sizes = [chance.randint(1 << 20, 24 << 20) for _ in range(chance.randint(20, 120))]
        blocks = [arena.reserve(size) for size in sizes]
        largest = max(largest, sum(-(-size // 512) * 512 for size in sizes))
        chance.shuffle(blocks)
        for block in blocks:
            assert block is not None
            arena.release(block)
    assert arena.peak_bytes == largest
    assert arena.capacity_bytes <= largest + max(largest // 16, 16 << 20)


class UnbackedBackend(HostBackend):
    """Slabs without memory behind them."""

    def allocate_host(self, num_bytes: int) -> HostSlab:
        return HostSlab(torch.empty(0, dtype=torch.uint8), num_bytes)


def test_held_blocks_count_against_the_budget_and_stay_whatever_else_moves() -> None:
    arena = HostArena(HostBackend(), 48 << 20)
    held = arena.hold(20 << 20)
    assert held is not None
    assert len(held.pieces) == 1
    write(held, 9)
    assert arena.hold(30 << 20) is None
    assert (arena.held_bytes, arena.free_bytes) == (20 << 20, 28 << 20)
    passing = arena.reserve(16 << 20)
    assert passing is not None
    write(passing, 1)
    assert arena.reserve(14 << 20) is None  # 48 - 20 - 16 are left
    arena.rebuild([])
    assert arena.used_bytes == 0
    assert holds(held, 9)
    assert arena.held_bytes == 20 << 20
    slab = StorageWeakRef(held.pieces[0].slab.data.untyped_storage())
    arena.release(held)
    assert arena.held_bytes == 0
    assert not slab.expired()
    del held
    assert slab.expired()


def test_memory_that_the_system_refuses_is_no_held_block() -> None:
    with pytest.raises(MemoryError, match="refused"):
        HostArena(RefusingBackend(), 1 << 20).hold(1000)
