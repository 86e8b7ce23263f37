"""Layers of several modules on the simulated device: what copies cost when they are produced faster than they leave."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from simulated_backend import SimulatedBackend
from simulated_model import GroupShape, Module
from torch import Tensor

from nemo_rl_offload.offload import overlap as worth
from nemo_rl_offload.offload.backends.base import Event, HostSlab
from nemo_rl_offload.offload.engine import OffloadEngine
from nemo_rl_offload.offload.memory_budget import MemoryBudgetController
from nemo_rl_offload.offload.selection import Selection

BYTES_PER_MS = 5500.0  # 55 GB/s, where a byte stands for 10 KB
GB = 100_000
DENSE = {  # a layer of Qwen2.5-7B at 8192 tokens
    "qkv_linear": GroupShape(11_700, 0.9, 1.8),
    "core_attn": GroupShape(14_000, 1.2, 2.4),
    "attn_proj": GroupShape(5_870, 0.5, 1.0),
    "mlp_fc1": GroupShape(11_700, 3.5, 7.0),
    "mlp_act": GroupShape(62_000, 0.3, 0.6),
}
EXPERTS = {  # a layer of DeepSeek-V3 at 4096 tokens
    "attn_norm": GroupShape(5_870, 0.3, 0.6),
    "mlp_norm": GroupShape(5_870, 4.2, 8.4),
    "expert_fc1": GroupShape(47_000, 3.2, 6.4),
    "moe_act": GroupShape(27_000, 0.6, 1.2),
}
LONG = {  # a layer of Qwen2.5-7B at 65,536 tokens, whose MLP is recomputed
    "qkv_linear": GroupShape(94_000, 9, 20),
    "core_attn": GroupShape(108_000, 56, 140),
    "attn_proj": GroupShape(47_000, 5, 10),
    "mlp_fc1": GroupShape(47_000, 45, 135),
}
PACK = {  # a layer of Qwen2.5-1.5B at 16,384 tokens: what it saves takes the link longer than its forward takes
    "qkv_linear": GroupShape(5_000, 0.3, 0.6),
    "core_attn": GroupShape(11_700, 0.4, 0.8),
    "attn_proj": GroupShape(5_000, 0.1, 0.2),
    "mlp_fc1": GroupShape(5_000, 0.8, 1.6),
    "mlp_act": GroupShape(88_000, 0.1, 0.2),
}
TAIL_MS = 2.0


class Tail(torch.autograd.Function):
    """What a layer does behind its last region; saves nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, backend: SimulatedBackend) -> Tensor:
        ctx.backend = backend
        backend.compute(TAIL_MS)
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.backend.compute(2 * TAIL_MS)
        return grad, None


@dataclass
class Layers:
    """Steps over `num_microbatches`, of which `num_ahead` are in flight as on the first of as many pipeline stages.

    With `waits`, the device stands still as there: until the first gradient has come back through the other stages, and
    between the last ones.
    """

    modules: dict[str, GroupShape]
    num_layers: int
    num_microbatches: int
    num_ahead: int
    budget_bytes: int | None = None
    waits: bool = False
    bounds: tuple[int | None, int | None] = (2 * GB, GB)
    """On copies out, and on what is reloaded ahead."""
    backend_type: type[SimulatedBackend] = SimulatedBackend

    def __post_init__(self) -> None:
        self.backend = self.backend_type(BYTES_PER_MS, BYTES_PER_MS, host_ahead_ms=50)
        self.engine = OffloadEngine(
            self.backend,
            host_memory_budget_bytes=1 << 26,
            min_tensor_bytes=0,
            max_inflight_bytes=self.bounds[0],
            max_prefetch_bytes=self.bounds[1],
            auto=None if self.budget_bytes is None else MemoryBudgetController(self.budget_bytes, 1 << 26),
            steps_are_told=True,
        )

    def forward(self) -> Tensor:
        x = torch.ones(1, requires_grad=True)
        for layer in range(self.num_layers):
            for module, shape in self.modules.items():
                with self.engine.region(module, layer) as region:
                    x = Module.apply(x, self.backend, shape)
                x = self.engine.commit(region, x)
            x = Tail.apply(x, self.backend)
        return x.sum()

    def step(self) -> tuple[float, int]:
        """How long it takes, and the most that the device held at once of what the modules save."""
        start_ms = began_ms = self.backend.now_ms
        forward_ms, backward_ms = self.pass_ms(forward=True), self.pass_ms(forward=False)
        alive: deque[Tensor] = deque()
        for number in range(self.num_microbatches):
            alive.append(self.forward())
            if len(alive) == self.num_ahead:
                if number == self.num_ahead - 1:
                    self.wait_until(start_ms + forward_ms * self.num_ahead + backward_ms * (self.num_ahead - 1))
                began_ms = self.backend.now_ms
                alive.popleft().backward()
        while alive:
            self.wait_until(began_ms + forward_ms + backward_ms)
            began_ms = self.backend.now_ms
            alive.popleft().backward()
        step_ms = self.backend.now_ms - start_ms
        self.backend.synchronize()
        self.engine.end_step()
        return step_ms, self.engine._copies.take_peak_resident_bytes()

    def wait_until(self, ms: float) -> None:
        if self.waits:
            self.backend.compute(max(0.0, ms - self.backend.now_ms))

    def pass_ms(self, *, forward: bool) -> float:
        tail_ms = TAIL_MS if forward else 2 * TAIL_MS
        modules = self.modules.values()
        return self.num_layers * (tail_ms + sum(each.forward_ms if forward else each.backward_ms for each in modules))

    @property
    def compute_ms(self) -> float:
        both_ms = self.pass_ms(forward=True) + self.pass_ms(forward=False)
        return both_ms * (self.num_microbatches + (self.num_ahead - 1 if self.waits else 0))

    @property
    def saved_bytes(self) -> int:
        return self.num_layers * sum(shape.num_bytes for shape in self.modules.values())


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("share", "lost"), [(0.9, 0.0), (0.8, 0.0), (0.7, 0.0), (0.6, 0.03), (0.5, 0.1)])
def test_auto_meets_a_budget_and_lets_copies_lag_within_it(share: float, lost: float) -> None:
    """Neighbouring layers save faster than the link takes it. As long as the budget has room, nothing waits for that;
    the forward is long enough to hide what four tenths of the bytes take, and below that the link decides."""
    layers = Layers(DENSE, 12, 2, 1)
    layers = Layers(DENSE, 12, 2, 1, int(share * layers.saved_bytes))
    figures = [layers.step() for _ in range(10)]
    assert layers.budget_bytes is not None
    for step_ms, peak_bytes in figures[4:]:
        assert step_ms <= (1 + lost) * layers.compute_ms + 1e-6
        assert peak_bytes <= layers.budget_bytes


def test_a_pipeline_brings_nothing_back_before_a_forward_that_comes_between() -> None:
    """As long as microbatches are left, a forward comes between two backwards; after the last one, none does."""
    layers = Layers(EXPERTS, 4, 16, 4)
    *_, (step_ms, peak_bytes) = [layers.step() for _ in range(5)]
    assert step_ms < 1.04 * layers.compute_ms
    assert peak_bytes < 3.6 * GB  # 13.7 GB are alive


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("num_layers", "num_microbatches", "num_ahead", "waits"),
    [(3, 4, 3, False), (5, 8, 3, False), (5, 16, 4, False), (7, 8, 4, True), (28, 8, 4, True)],
)
def test_backwards_that_follow_each_other_find_their_bytes(
    num_layers: int, num_microbatches: int, num_ahead: int, waits: bool
) -> None:
    """The last of a pipeline have no forward between them, the others have: that is known when one begins."""
    copy_ms = 1.6
    layer = {"layer": GroupShape(int(copy_ms * BYTES_PER_MS), 2, 4)}
    layers = Layers(layer, num_layers, num_microbatches, num_ahead, waits=waits)
    stalls_ms = []
    for _ in range(6):
        layers.step()
        stalls_ms.append(layers.engine.stats().stall_in_ms)
    assert all(after - before < 1.01 * copy_ms for before, after in pairwise(stalls_ms))


@pytest.mark.parametrize("num_microbatches", [6, 16])
def test_the_first_stage_of_a_pipeline_loses_nothing(num_microbatches: int) -> None:
    """Before the first gradient it waits for other stages, behind other forwards for nobody: copies of those have not
    ended when their backward begins. What the first gradient needs is back when it comes, whatever else the device
    did since the step before; so is what each of the last needs, which come behind waits again."""
    layers = Layers(EXPERTS, 4, num_microbatches, 4, waits=True)
    for pause_ms in (200, 9000, 50, 3000, 700):
        step_ms, peak_bytes = layers.step()
        layers.backend.compute(pause_ms)
    assert step_ms == pytest.approx(layers.compute_ms)
    assert peak_bytes < 3.2 * GB  # 13.7 GB are alive
    before_ms = layers.engine.stats().stall_in_ms
    layers.step()
    assert layers.engine.stats().stall_in_ms == pytest.approx(before_ms)


def test_figures_are_those_of_every_step_once_the_device_was_waited_for() -> None:
    """The step that was just timed, too, and not only those before it."""

    class Behind(SimulatedBackend):
        """The device has not come to the step's end when the host has."""

        waited = False

        def done(self, event: Event) -> bool:
            return self.waited and super().done(event)

    layers = Layers(EXPERTS, 2, 1, 1, backend_type=Behind)
    layers.step()
    assert layers.engine.stats().copy_ms == 0
    layers.backend.waited = True  # type: ignore[attr-defined]
    loss = layers.forward()
    assert layers.engine.stats().copy_ms == 0, "what a step goes by stays as it is until it is over"
    loss.backward()
    del loss
    assert layers.engine.stats().copy_ms > 0


@pytest.mark.parametrize(
    "is_late", [lambda forward: forward % 2 == 0, lambda forward: forward // 8 % 3 != 0], ids=["forwards", "steps"]
)
def test_a_host_that_is_late_at_times_makes_no_copy_seem_done(is_late: Callable[[int], bool]) -> None:
    """Then the device takes longer for the same layers, here for those of every other forward, or of two steps in
    three."""

    class Late(SimulatedBackend):
        num_calls = 0

        def compute(self, ms: float) -> None:
            passes, self.num_calls = self.num_calls // (4 * (len(EXPERTS) + 1)), self.num_calls + 1
            super().compute(ms * 1.5 if passes % 2 == 0 and is_late(passes // 2) else ms)

    layers = Layers(EXPERTS, 4, 8, 1, bounds=(4 * GB, 4 * GB), backend_type=Late)
    for _ in range(6):
        layers.step()
    before_ms = layers.engine.stats().stall_out_ms
    for _ in range(3):
        layers.step()
    assert layers.engine.stats().stall_out_ms - before_ms < 1


def test_the_first_plan_is_made_for_a_whole_step() -> None:
    layers = Layers(DENSE, 2, 3, 1, GB)
    layers.step()
    auto = layers.engine._auto
    assert auto is not None
    assert auto._num_steps == 1


def test_groups_of_a_gibibyte_move_beside_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a bound, the engine lets two of the largest groups be under way. A fixed gibibyte makes compute wait for
    each, and holds no less at the peak."""
    monkeypatch.setattr(worth, "MIN_BOUND_BYTES", GB)
    layers = Layers(LONG, 12, 1, 1, bounds=(None, None))
    *_, (step_ms, peak_bytes) = [layers.step() for _ in range(5)]
    assert step_ms == pytest.approx(layers.compute_ms)
    fixed = Layers(LONG, 12, 1, 1, bounds=(GB, GB))
    *_, (fixed_ms, fixed_peak_bytes) = [fixed.step() for _ in range(5)]
    assert fixed_ms > 1.05 * layers.compute_ms
    assert peak_bytes <= fixed_peak_bytes < 0.1 * layers.saved_bytes


class Full(SimulatedBackend):
    """Nothing is unused."""

    def unused_bytes(self) -> int | None:
        return 0


def test_compute_hardly_waits_for_a_link_that_is_slower_than_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """What moves is spread over the layers. Where the device has no room, or a bound is given, compute waits."""
    monkeypatch.setattr(worth, "MIN_BOUND_BYTES", GB)
    lost, peaks = [], []
    bound = 2 * PACK["mlp_act"].num_bytes
    for bounds, kind in ((None, SimulatedBackend), (None, Full), (bound, SimulatedBackend)):
        layers = Layers(PACK, 28, 1, 1, bounds=(bounds, bounds), backend_type=kind)
        *_, (step_ms, peak_bytes) = [layers.step() for _ in range(4)]
        lost.append(step_ms / layers.compute_ms - 1)
        peaks.append(peak_bytes / layers.saved_bytes)
    assert lost[0] <= worth.MOST_WAITED + 0.001
    assert lost[1] == lost[2] > 0.4
    assert 0.7 < peaks[1] == peaks[2] < peaks[0] < 0.85


@pytest.mark.parametrize("given", ["bytes", "groups", "budget"])
def test_a_bound_of_the_users_own_and_a_budget_keep_nothing_lest_compute_waits(
    monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    monkeypatch.setattr(worth, "MIN_BOUND_BYTES", GB)
    layers = Layers(PACK, 8, 1, 1, bounds=(None, None))
    auto = MemoryBudgetController(layers.saved_bytes, 1 << 26) if given == "budget" else None
    bounds = {"bytes": {"max_inflight_bytes": 2 * GB}, "groups": {"max_inflight_groups": 1}}.get(given, {})
    layers.engine = OffloadEngine(
        layers.backend, host_memory_budget_bytes=1 << 26, min_tensor_bytes=0, auto=auto, steps_are_told=True, **bounds
    )
    told = []
    learn = Selection.learn

    def learn_and_tell(*args: Any) -> None:
        told.append(args[4])
        learn(*args)

    monkeypatch.setattr(Selection, "learn", learn_and_tell)
    for _ in range(4):
        layers.step()
    assert told == [None] * 4
    free = Layers(PACK, 8, 1, 1, bounds=(None, None))
    for _ in range(4):
        free.step()
    assert free.engine._selection._waiting


class Card(SimulatedBackend):
    """Has room for `capacity_bytes` of what layers save."""

    layers: Layers
    capacity_bytes: int

    def unused_bytes(self) -> int | None:
        return self.capacity_bytes - self.layers.engine._copies._peak_resident_bytes


def on_card(capacity: float, num_microbatches: int = 1) -> Layers:
    """Packs on a card of so many times what one of them saves."""
    layers = Layers(PACK, 28, num_microbatches, 1, bounds=(None, None), backend_type=Card)
    assert isinstance(layers.backend, Card)
    layers.backend.layers, layers.backend.capacity_bytes = layers, int(capacity * layers.saved_bytes)
    return layers


def step_of(layers: Layers, length: float) -> tuple[float, float]:
    """With sequences of so many times the length, the time in that of compute, and the peak in those of the card."""
    layers.modules = {
        name: GroupShape(int(length * each.num_bytes), length * each.forward_ms, length * each.backward_ms)
        for name, each in PACK.items()
    }
    step_ms, peak_bytes = layers.step()
    assert isinstance(layers.backend, Card)
    return step_ms / layers.compute_ms, peak_bytes / layers.backend.capacity_bytes


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize(("capacity", "spread"), [(0.78, False), (0.9, True)])
def test_what_stays_lest_compute_waits_does_not_change_from_step_to_step(
    monkeypatch: pytest.MonkeyPatch, capacity: float, spread: bool, num_microbatches: int
) -> None:
    """Moved as far as there is time, the layers hold 0.74 of what they save at once, and spread 0.84."""
    monkeypatch.setattr(worth, "MIN_BOUND_BYTES", GB)
    layers = on_card(capacity, num_microbatches)
    times, peaks = zip(*[step_of(layers, 1) for _ in range(9)][3:], strict=True)
    assert max(peaks) <= 1
    assert max(peaks) - min(peaks) < 0.001
    assert max(times) < 1.01 if spread else min(times) > 1.5


@pytest.mark.parametrize(
    ("capacity", "lengths"),
    [
        (1.68, (1, 1, 1, 1, 2, 1, 1, 2, 2)),
        (1.68, (2, 1, 1, 1, 1, 2, 1, 2)),
        (1.68, (1, 1, 1, 1.5, 1, 1, 2, 1, 2)),
        (1.63, (2, 1, 1, 1, 1, 2, 1, 2)),
    ],
)
def test_longer_sequences_than_before_move_as_if_there_were_no_room(
    monkeypatch: pytest.MonkeyPatch, capacity: float, lengths: tuple[float, ...]
) -> None:
    """Short ones leave room for what would stay. Long ones, of twice the length, fit only where that moves: they hold
    1.62 of what short ones save then, and 1.77 where they are spread."""
    monkeypatch.setattr(worth, "MIN_BOUND_BYTES", GB)
    layers = on_card(capacity)
    for _ in range(2):
        step_of(layers, lengths[0])  # rates are not known yet
    figures = [step_of(layers, length) for length in lengths]
    assert max(peak for _, peak in figures) <= 1
    assert all(time > 1.3 for (time, _), length in zip(figures, lengths, strict=True) if length == 2)


def test_longer_sequences_are_spread_too_once_their_room_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worth, "MIN_BOUND_BYTES", GB)
    layers = on_card(4)
    figures = [step_of(layers, length) for length in (1, 1, 1, 1, 2, 2, 2)]
    assert [time < 1.02 for time, _ in figures[2:]] == [True, True, False, True, True]


def test_a_budget_that_cannot_be_met_does_not_make_every_copy_wait() -> None:
    layers = Layers(DENSE, 4, 2, 1, 1)
    with pytest.warns(UserWarning, match="cannot be met"):
        figures = [layers.step() for _ in range(6)]
    unbounded = Layers(DENSE, 4, 2, 1)
    plain = [unbounded.step() for _ in range(6)]
    assert figures[-1][0] <= 1.1 * plain[-1][0]


def test_pinning_memory_is_taken_neither_for_a_slow_link_nor_for_slow_compute() -> None:
    """The device has nothing to do while the host pins memory, in the first step. The second step moves what every
    later one does."""

    class Pinning(SimulatedBackend):
        def allocate_host(self, num_bytes: int) -> HostSlab:
            self.compute(300)
            return super().allocate_host(num_bytes)

    assert moved_by(Pinning) == moved_by(SimulatedBackend)


def test_a_first_step_that_compiles_teaches_nothing_for_long() -> None:
    """Its kernels take a hundred times as long. From the third step on, all is as if it had not been so."""

    class Compiling(SimulatedBackend):
        num_slow = 4 * (len(DENSE) + 1) * 2

        def compute(self, ms: float) -> None:
            self.num_slow -= 1
            super().compute(ms * 100 if self.num_slow >= 0 else ms)

    assert moved_by(Compiling)[2:] == moved_by(SimulatedBackend)[2:]


def moved_by(kind: type[SimulatedBackend]) -> list[int]:
    """Bytes that each of some steps moves out."""
    layers = Layers(DENSE, 4, 1, 1, backend_type=kind)
    moved = []
    for _ in range(5):
        before = layers.engine.stats().bytes_out
        layers.step()
        moved.append(layers.engine.stats().bytes_out - before)
    assert layers.engine._timing.copy_ms(1, out=True) == pytest.approx(1 / BYTES_PER_MS)
    assert layers.engine.stats().stall_out_ms < 100
    return moved
