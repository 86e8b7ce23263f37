"""The random cases find nothing in the engine, and find what is planted."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from random_cases import run_case
from torch import Tensor

from nemo_rl_offload.offload import arena as arena_module
from nemo_rl_offload.offload.backends.base import Block
from nemo_rl_offload.offload.backends.simulated import SimulatedBackend
from nemo_rl_offload.offload.copies import Copies
from nemo_rl_offload.offload.engine import Region
from nemo_rl_offload.offload.prefetch import Prefetch
from nemo_rl_offload.offload.slots import Group, Kept, Slot, State

pytestmark = pytest.mark.filterwarnings("ignore:Host memory for offloading stays")


def faults(seeds: range) -> list[str]:
    return [f"seed {seed}: {fault}" for seed in seeds for fault in run_case(seed).faults]


def test_no_fault_is_found() -> None:
    assert faults(range(10_000, 10_150)) == []


def test_what_a_forecast_lets_a_boundary_skip_is_not_due(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reloads are looked for again only where something may have become due since it was last known that nothing is."""
    ahead, skipped = Prefetch.ahead, []

    def ahead_and_check(self: Prefetch, group: Group, forward: bool) -> None:
        searches = []

        def due(*args: Any) -> Any:
            searches.append(args)
            return Prefetch._due(self, *args)

        monkeypatch.setattr(self, "_due", due, raising=False)
        ahead(self, group, forward)
        former, next_boundary_ms = self._order.latest, self._timing.after_ms(group, forward, self._order.phase)
        if former is not None and next_boundary_ms is not None and not searches:
            first_due_ms = next_boundary_ms if forward and self._order.first_backward_follows(group) else None
            skipped.append(Prefetch._due(self, former, next_boundary_ms, first_due_ms)[0])

    monkeypatch.setattr(Prefetch, "ahead", ahead_and_check)
    assert faults(range(20_000, 20_150)) == []
    assert len(skipped) > 100
    assert not any(skipped)


@pytest.mark.slow
def test_no_fault_is_found_in_a_thousand() -> None:
    assert faults(range(1000)) == []


def wait_removed(patch: pytest.MonkeyPatch) -> None:
    def arrive(self: Copies, slot: Slot) -> None:
        slot.state = State.RESIDENT
        if slot.unused:
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
        held = *packed[:-1], (packed[-1], tensor)
        return Kept(*held) if isinstance(packed, Kept) else held

    patch.setattr(Region, "_pack", pack_and_hold)


def fences_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(arena_module.FreeExtents, "pending", lambda self, fences: ())


def reload_before_its_copy(patch: pytest.MonkeyPatch) -> None:
    copy_in = SimulatedBackend.copy_in

    def copy_at_once(self: SimulatedBackend, block: Block) -> Any:
        block.last_event = self._operation_on(0, 0.0)
        return copy_in(self, block)

    patch.setattr(SimulatedBackend, "copy_in", copy_at_once)


def prefetch_dropped_while_loading(patch: pytest.MonkeyPatch) -> None:
    delete = Slot.__del__

    def forget(self: Slot) -> None:
        self.in_event = None
        delete(self)

    patch.setattr(Slot, "__del__", forget)


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
