"""Ranks that plan alike although their steps differ: threads that train at once and share their measurements."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from patience import PATIENCE_S
from simulated_backend import SimulatedBackend
from simulated_model import GroupShape, train_step

from nemo_rl_offload.offload.engine import OffloadEngine
from nemo_rl_offload.offload.memory_budget import Measured, MemoryBudgetController, reduce_max_over_ranks

MIN_BYTES = 10_000
NUM_STEPS = 9


class Rank:
    def __init__(self, number: int, gathered: dict[int, Measured], barrier: threading.Barrier) -> None:
        self._number, self._gathered, self._barrier = number, gathered, barrier
        self.num_plans = 0
        self.auto = MemoryBudgetController(100_000, 1 << 24, self._agree)
        self._backend = SimulatedBackend(5000.0, 5000.0)
        self.engine = OffloadEngine(
            self._backend,
            host_memory_budget_bytes=1 << 24,
            min_tensor_bytes=MIN_BYTES,
            auto=self.auto,
            steps_are_told=True,
        )

    def _agree(self, measured: Measured) -> Measured:
        self._gathered[self._number] = measured
        self._barrier.wait()
        shared = reduce_max_over_ranks([self._gathered[number] for number in sorted(self._gathered)])
        self._barrier.wait()
        self.num_plans += 1
        return shared

    def train(self, steps: list[list[int]]) -> None:
        for sizes in steps:
            train_step(self.engine, self._backend, [GroupShape(size, 10.0, 20.0) for size in sizes])


def trained(steps: list[list[list[int]]]) -> list[Rank]:
    """One rank for each list of steps, each of them the bytes that its modules save."""
    gathered: dict[int, Measured] = {}
    barrier = threading.Barrier(len(steps), timeout=PATIENCE_S)
    ranks = [Rank(number, gathered, barrier) for number in range(len(steps))]
    with ThreadPoolExecutor(len(steps)) as pool:
        for done in [pool.submit(rank.train, rank_steps) for rank, rank_steps in zip(ranks, steps, strict=True)]:
            done.result()
    return ranks


LONG = [40_000, 12_000, 40_000, 40_000]


@pytest.mark.parametrize(
    "short",
    [
        pytest.param([30_000, 9000, 30_000, 30_000], id="lacks-one-group"),
        pytest.param([9000] * 4, id="lacks-all-groups"),
        pytest.param(LONG, id="alike"),
    ],
)
def test_a_rank_whose_tensors_are_too_small_plans_as_the_others_do(short: list[int]) -> None:
    ranks = trained([[short] * NUM_STEPS, [LONG] * NUM_STEPS])
    assert [rank.num_plans for rank in ranks] == [5, 5]
    first, second = (rank.auto.plan for rank in ranks)
    assert first is not None
    assert first == second
    assert len(first.actions) == len(LONG)
    assert ranks[0].engine._selection.kept == ranks[1].engine._selection.kept


def test_ranks_that_lack_groups_in_some_steps_plan_at_the_same_ones() -> None:
    some, none = [40_000] * 4, [9000] * 4
    ranks = trained([[some, none, none] * 3, [none, none, some] * 3, [none] * NUM_STEPS])
    assert [rank.num_plans for rank in ranks] == [5, 5, 5]
    assert ranks[0].auto.plan == ranks[1].auto.plan == ranks[2].auto.plan


def test_where_no_rank_has_a_group_nothing_is_planned() -> None:
    ranks = trained([[[9000] * 4] * NUM_STEPS] * 2)
    assert [rank.auto.plan for rank in ranks] == [None, None]


def test_largest_is_element_wise_over_the_union_in_the_fullest_ranks_order() -> None:
    a, b, c = ("m", 0), ("m", 1), ("n", 0)
    first = Measured((4.0, 2.0), {b: (1.0, 9.0)})
    second = Measured((5.0, 1.0), {a: (3.0, 3.0), b: (2.0, 1.0)})
    third = Measured((5.0, 1.0), {c: (7.0, 7.0)})
    shared = reduce_max_over_ranks([first, second, third])
    assert shared.step == (5.0, 2.0)
    assert list(shared.groups.items()) == [(a, (3.0, 3.0)), (b, (2.0, 9.0)), (c, (7.0, 7.0))]
