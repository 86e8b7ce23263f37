"""The arena against a byte map, and its promises about budget, fences and refusal."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_offload.offload import arena as arena_module
from nemo_rl_offload.offload.arena import FreeExtents, HostArena
from nemo_rl_offload.offload.backends.base import Event, HostSlab
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
        fits = [
            (size, slab, offset) for slab in range(2) for size, offset in free_runs(maps[slab]) if size >= operation
        ]
        taken = extents.take(operation)
        if not fits:
            assert taken is None
            continue
        assert taken == (*min(fits)[1:], ())
        slab, offset, _ = taken
        maps[slab][offset : offset + operation] = [True] * operation
        live.append((slab, offset, operation))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 3000), st.booleans()), max_size=50))
def test_blocks_never_overlap_and_stay_in_the_budget(requests: list[tuple[int, bool]]) -> None:
    budget_bytes = 1 << 15
    arena = HostArena(HostBackend(), budget_bytes)
    blocks = []
    for number, (num_bytes, give_back) in enumerate(requests):
        block = arena.reserve(num_bytes)
        if block is not None:
            assert block.offset % 512 == 0
            block.data().fill_(number % 251)
            blocks.append((block, number % 251))
        if give_back and blocks:
            gone, value = blocks.pop(number % len(blocks))
            assert (gone.data() == value).all()
            arena.release(gone)
        assert arena.capacity_bytes <= budget_bytes
        assert arena.used_bytes == sum(-(-each.num_bytes // 512) * 512 for each, _ in blocks)
    for block, value in blocks:
        assert (block.data() == value).all()
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


def test_a_block_larger_than_a_usual_slab_gets_its_own() -> None:
    arena = HostArena(HostBackend(), 64 << 20)
    block = arena.reserve((17 << 20) + 1)
    assert block is not None
    assert block.data().shape == torch.Size([(17 << 20) + 1])
    assert arena.capacity_bytes == 32 << 20
