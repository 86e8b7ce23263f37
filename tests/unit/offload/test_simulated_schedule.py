"""Does compute wait where it need not? The engine on the simulated device against a search over all schedules."""

import random

import pytest
from simulated_backend import SimulatedBackend
from simulated_model import GroupShape, StepFigures, train_step

from nemo_rl_offload.offload.engine import OffloadEngine
from nemo_rl_offload.offload.memory_budget import MemoryBudgetController

BYTES_PER_MS = 5000.0  # 50 GB/s, where a byte stands for 10 KB


def schedule_without_stall_exists(shapes: list[GroupShape], moved: tuple[int, ...], cap: int, head_ms: float) -> bool:
    """Whether some choice of boundaries for the reloads lets compute never wait: tries them all."""
    last = len(shapes) - 1
    reached_ms, commit_ms, now = {}, {}, 0.0
    for layer, shape in enumerate(shapes):
        now += shape.forward_ms
        commit_ms[layer] = now
    start_ms = now
    now += head_ms
    for layer in range(last, -1, -1):
        reached_ms[layer] = now
        now += shapes[layer].backward_ms
    copied_ms, free_ms = {}, 0.0
    for layer in moved:
        free_ms = max(free_ms, commit_ms[layer]) + shapes[layer].num_bytes / BYTES_PER_MS
        copied_ms[layer] = free_ms
    boundaries = [(start_ms, -1), *((reached_ms[layer], layer) for layer in range(last, -1, -1))]
    wanted = sorted(moved, reverse=True)

    def search(done: int, first_boundary: int, link_free_ms: float) -> bool:
        if done == len(wanted):
            return True
        layer = wanted[done]
        for position in range(first_boundary, len(boundaries)):
            at_ms, at_layer = boundaries[position]
            unused = sum(shapes[each].num_bytes for each in wanted[:done] if reached_ms[each] > at_ms)
            if at_layer != layer and unused + shapes[layer].num_bytes > cap:
                continue
            end_ms = max(at_ms, link_free_ms, copied_ms[layer]) + shapes[layer].num_bytes / BYTES_PER_MS
            if end_ms > reached_ms[layer] + 1e-9:
                return False
            if search(done + 1, position, end_ms):
                return True
        return False

    return search(0, 0, 0.0)


def random_shapes(chance: random.Random, max_groups: int) -> list[GroupShape]:
    kinds = [
        GroupShape(chance.randint(500, 20_000), forward_ms := chance.uniform(0.3, 8), 2 * forward_ms)
        for _ in range(chance.randint(1, 4))
    ]
    return [chance.choice(kinds) for _ in range(chance.randint(2, max_groups))]


def engine_on(
    backend: SimulatedBackend, cap: int = 1 << 30, auto: MemoryBudgetController | None = None
) -> OffloadEngine:
    return OffloadEngine(
        backend, host_memory_budget_bytes=1 << 24, min_tensor_bytes=0, max_prefetch_bytes=cap, auto=auto
    )


def compute_ms(shapes: list[GroupShape], head_ms: float = 0.0) -> float:
    return head_ms + sum(shape.forward_ms + shape.backward_ms for shape in shapes)


@pytest.mark.slow
def test_no_stall_where_a_search_finds_none() -> None:
    num_free, num_moved = 0, 0
    for seed in range(120):
        chance = random.Random(seed)
        shapes = random_shapes(chance, 10)
        head_ms, cap = chance.choice([0.0, 1.0, 10.0]), chance.choice([30_000, 60_000, 1 << 30])
        backend = SimulatedBackend(BYTES_PER_MS, BYTES_PER_MS, chance.choice([0.0, 1e9]))
        engine = engine_on(backend, cap)
        for _ in range(5):
            figures = train_step(engine, backend, shapes, head_ms)
        num_moved += len(figures.moved)
        if schedule_without_stall_exists(shapes, figures.moved, cap, head_ms):
            num_free += 1
            assert figures.step_ms <= 1.005 * compute_ms(shapes, head_ms), (seed, figures)
    assert num_free > 60
    assert num_moved > 300


def alternate(engine: OffloadEngine, backend: SimulatedBackend, shapes: list[GroupShape]) -> StepFigures:
    """Steps of other lengths in between: bytes and times times a factor."""
    for factor in (1.0, 0.5, 2.0, 0.7, 1.0):
        scaled = [GroupShape(int(s.num_bytes * factor), s.forward_ms * factor, s.backward_ms * factor) for s in shapes]
        figures = train_step(engine, backend, scaled)
    return figures


def test_lengths_that_change_cost_nothing() -> None:
    for seed in range(20):
        chance = random.Random(seed)
        shapes = [GroupShape(chance.randint(1000, 9000), 2.0, 4.0)] * chance.randint(4, 10)
        backend = SimulatedBackend(BYTES_PER_MS, BYTES_PER_MS, 1e9)
        figures = alternate(engine_on(backend), backend, shapes)
        assert len(figures.moved) >= len(shapes) - 2
        assert figures.step_ms <= 1.005 * compute_ms(shapes)


@pytest.mark.parametrize("slowness", [0.5, 0.25])
def test_auto_on_a_slow_link_offloads_no_more_than_hides(slowness: float) -> None:
    """The copies of all groups take longer than compute does: those that hide are offloaded, the rest stays."""
    shapes = [GroupShape(10_000, 2.0, 4.0)] * 10  # 2 ms to copy out at full speed
    backend = SimulatedBackend(BYTES_PER_MS * slowness, BYTES_PER_MS * slowness, 1e9)
    hidden_groups = int(10 * slowness) - 1
    auto = MemoryBudgetController(budget_bytes=10_000 * (10 - hidden_groups + 2), host_budget_bytes=1 << 24)
    engine = engine_on(backend, auto=auto)
    for _ in range(9):
        figures = train_step(engine, backend, shapes)
    assert hidden_groups - 1 <= len(figures.moved) < 10
    assert figures.step_ms <= 1.02 * compute_ms(shapes)


def test_auto_with_room_offloads_nothing_and_without_room_says_so() -> None:
    shapes = [GroupShape(10_000, 2.0, 4.0)] * 6
    backend = SimulatedBackend(BYTES_PER_MS, BYTES_PER_MS)
    engine = engine_on(backend, auto=MemoryBudgetController(budget_bytes=1 << 20, host_budget_bytes=1 << 24))
    moved = [train_step(engine, backend, shapes).moved for _ in range(4)]
    assert moved[0] == tuple(range(6))
    assert moved[-1] == ()
    engine = engine_on(backend, auto=MemoryBudgetController(budget_bytes=5_000, host_budget_bytes=1 << 24))
    with pytest.warns(UserWarning, match="cannot be met by offloading"):
        moved = [train_step(engine, backend, shapes).moved for _ in range(4)]
    assert len(moved[-1]) >= 5


def test_auto_keeps_the_budget_and_uses_it() -> None:
    for seed in range(30):
        chance = random.Random(seed)
        shapes = [GroupShape(chance.randint(2000, 10_000), 2.0, 4.0) for _ in range(10)]
        total = sum(shape.num_bytes for shape in shapes)
        budget_bytes = int(total * chance.uniform(0.6, 0.9))
        backend = SimulatedBackend(BYTES_PER_MS, BYTES_PER_MS)
        engine = engine_on(backend, auto=MemoryBudgetController(budget_bytes, host_budget_bytes=1 << 24))
        for _ in range(10):
            engine._copies.take_peak_resident_bytes()
            train_step(engine, backend, shapes)
        peak_bytes = engine._copies.take_peak_resident_bytes()
        assert peak_bytes <= budget_bytes, seed
        assert peak_bytes >= 0.7 * budget_bytes, seed
