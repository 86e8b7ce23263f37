"""The random cases find nothing in the engine, and find what is planted."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from random_cases import run_case
from simulated_backend import SimulatedBackend
from torch import Tensor

from nemo_rl_offload.offload import arena as arena_module
from nemo_rl_offload.offload.backends.base import Block
from nemo_rl_offload.offload.copies import Copies
from nemo_rl_offload.offload.engine import Region
from nemo_rl_offload.offload.prefetch import HORIZON, Prefetch
from nemo_rl_offload.offload.slots import Group, Slot, SlotRef, State

pytestmark = pytest.mark.filterwarnings("ignore:Host memory for offloading stays")


def faults(seeds: range) -> list[str]:
    return [f"seed {seed}: {fault}" for seed in seeds for fault in run_case(seed).faults]


def test_no_fault_is_found() -> None:
    assert faults(range(10_000, 10_150)) == []


@pytest.mark.slow
def test_a_plan_that_is_kept_says_what_a_new_one_would(monkeypatch: pytest.MonkeyPatch) -> None:
    follows_plan, num_kept = Prefetch._follows_plan, 0

    def plan_of(prefetch: Prefetch) -> tuple[list[Group], dict[Group, float]]:
        starts = [(ref(), start_ms + prefetch._late_ms) for start_ms, ref in prefetch._starts]
        upcoming = [group for ref, _ in prefetch._upcoming if (group := ref()) is not None]
        return upcoming, {group: start_ms for group, start_ms in starts if group is not None and group.pending_bytes}

    def follow_and_check(self: Prefetch, group: Group, forward: bool) -> bool:
        nonlocal num_kept
        if not follows_plan(self, group, forward):
            return False
        upcoming, starts = plan_of(self)
        is_cut, former = self._least_upcoming > 0, self._order.latest
        assert former is not None
        kept = deque(self._upcoming), self._starts, self._late_ms, self._least_upcoming
        self._plan(former, None)
        new_upcoming, new_starts = plan_of(self)
        self._upcoming, self._starts, self._late_ms, self._least_upcoming = kept
        assert upcoming[:HORIZON] == new_upcoming[:HORIZON]
        assert is_cut or starts == pytest.approx(new_starts)
        num_kept += bool(starts)
        return True

    monkeypatch.setattr(Prefetch, "_follows_plan", follow_and_check)
    assert faults(range(20_000, 20_150)) == []
    assert num_kept > 100


@pytest.mark.sampled
@pytest.mark.slow
def test_no_fault_is_found_in_a_thousand() -> None:
    assert faults(range(1000)) == []


def wait_removed(patch: pytest.MonkeyPatch) -> None:
    def arrive(self: Copies, slot: Slot) -> None:
        slot.state = State.RESIDENT
        if slot.ref.unused:
            self.used(slot)

    patch.setattr(Copies, "arrive", arrive)


def early_release(patch: pytest.MonkeyPatch) -> None:
    def let_go(self: Copies) -> None:
        while self._inflight:
            self._drop_oldest()

    patch.setattr(Copies, "let_go", let_go)


def handle_with_grad_fn(patch: pytest.MonkeyPatch) -> None:
    pack = Region._pack

    def pack_and_hold(self: Region, tensor: Tensor) -> Any:
        packed = pack(self, tensor)
        return *packed[:-1], (packed[-1], tensor)

    patch.setattr(Region, "_pack", pack_and_hold)


def fences_forgotten(patch: pytest.MonkeyPatch) -> None:
    reserve = arena_module.HostArena.reserve

    def forget(self: arena_module.HostArena, num_bytes: int) -> Block | None:
        block = reserve(self, num_bytes)
        if block is not None:
            block.fences = ()
        return block

    patch.setattr(arena_module.HostArena, "reserve", forget)


def reload_before_its_copy(patch: pytest.MonkeyPatch) -> None:
    copy_in = SimulatedBackend.copy_in

    def copy_at_once(self: SimulatedBackend, blocks: Sequence[Block], started: Any) -> Any:
        for block in blocks:
            block.last_event = self._operation_on(0, 0.0)
        return copy_in(self, blocks, started)

    patch.setattr(SimulatedBackend, "copy_in", copy_at_once)


def prefetch_dropped_while_loading(patch: pytest.MonkeyPatch) -> None:
    release = Copies.release

    def forget(self: Copies, dead_slot: SlotRef) -> None:
        dead_slot.loading = None
        release(self, dead_slot)

    patch.setattr(Copies, "release", forget)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("plant", "words", "first_seed"),
    [
        (wait_removed, "wrong tensor", 0),
        (early_release, "a source was freed", 0),
        (handle_with_grad_fn, "leak", 0),
        (fences_forgotten, "the same host bytes", 300),  # rare, since the block that has waited longest goes first
        (reload_before_its_copy, "the same host bytes", 0),
        (prefetch_dropped_while_loading, "a destination was freed", 500),
    ],
)
def test_a_planted_fault_is_found(
    monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None], words: str, first_seed: int
) -> None:
    plant(monkeypatch)
    seeds = range(first_seed, first_seed + 150)
    assert any(words in fault for seed in seeds for fault in run_case(seed).faults)
    torch.manual_seed(0)
