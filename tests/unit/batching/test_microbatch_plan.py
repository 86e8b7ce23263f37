"""Plans of microbatches: every sample once, within the budget, as many on every rank, costliest first."""

import math
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from nemo_rl_offload.batching.bins import BINS, concatenative, first_fit_decreasing, modified_first_fit_decreasing
from nemo_rl_offload.batching.plan import (
    Lengths,
    MicrobatchPlan,
    PlannedMicrobatch,
    TokenBudget,
    plan_packed,
    plan_padded,
)
from nemo_rl_offload.specs.parallel_layout import LengthRound, rounded_length

SAMPLES = st.integers(1, 2).flatmap(
    lambda rows: st.lists(st.lists(st.integers(1, 20), min_size=rows, max_size=rows), min_size=1, max_size=30)
)
ROUNDS = st.sampled_from([1, 4, "power_of_two"])
PACKERS = {name: partial(plan_packed, algorithm=name) for name in BINS}  # type: ignore[arg-type]
PLANS: dict[str, Callable[[list[Lengths], TokenBudget], MicrobatchPlan]] = {"padded": plan_padded, **PACKERS}


def num_tokens(samples: list[Lengths], microbatch: PlannedMicrobatch, name: str) -> int:
    """Positions that a microbatch holds, padding included."""
    if name in BINS:
        return microbatch.width
    return (len(microbatch.samples) + microbatch.num_filled) * len(samples[0]) * microbatch.width


@pytest.mark.parametrize("name", PLANS)
@given(
    samples=SAMPLES,
    length_round=ROUNDS,
    width_multiple=st.sampled_from([1, 2]),
    num_tokens_wanted=st.integers(1, 200),
    num_ranks=st.integers(1, 3),
    group_size=st.sampled_from([1, 2]),
    one_shape=st.booleans(),
    sequence_multiple=st.sampled_from([1, 4]),
)
@settings(max_examples=150, deadline=None)
def test_a_plan_holds_every_sample_once_and_keeps_the_budget(
    name: str,
    samples: list[Lengths],
    length_round: LengthRound,
    width_multiple: int,
    num_tokens_wanted: int,
    num_ranks: int,
    group_size: int,
    one_shape: bool,
    sequence_multiple: int,
) -> None:
    width_multiple = max(width_multiple, sequence_multiple)  # where ranks share each sequence, also the whole pack
    budget = TokenBudget(
        num_tokens_wanted, length_round, width_multiple, num_ranks, group_size, one_shape, sequence_multiple
    )
    rows = len(samples[0])
    packed = [sum(-(-length // sequence_multiple) * sequence_multiple for length in sample) for sample in samples]
    longest = max(packed) if name in BINS else max(max(sample) * rows for sample in samples)
    largest = budget.width(longest) if name in BINS else rows * budget.width(longest // rows)
    assume(num_tokens_wanted >= largest)  # the configuration's rule
    plan = PLANS[name](samples, budget)

    assert len(plan) == num_ranks
    assert len({len(microbatches) for microbatches in plan}) == 1
    assert len(plan[0]) % group_size == 0
    parts = [part for microbatches in plan for part in microbatches]
    assert sorted(number for part in parts for number in part.samples) == list(range(len(samples)))
    for part in parts:
        assert part.samples or part.num_filled
        assert num_tokens(samples, part, name) <= num_tokens_wanted
        assert part.width % width_multiple == 0
        if name in BINS:
            filling = min(range(len(samples)), key=lambda number: max(samples[number]))  # as `shard_by_plan` chooses
            assert part.width >= (sum(packed[number] for number in part.samples) or packed[filling])
        else:
            assert part.width >= max((max(samples[number]) for number in part.samples), default=1)
    if one_shape:
        assert len({part.width for part in parts}) == 1
        assert name in BINS or len({len(part.samples) + part.num_filled for part in parts}) == 1
    else:
        empty = [part for part in parts if not part.samples]
        assert not empty or all(len(part.samples) <= 1 for part in parts), "there is something left to split"
        assert all(part.num_filled == 0 for part in parts if part.samples)


@given(samples=SAMPLES.filter(lambda samples: len(samples) > 3), num_ranks=st.integers(2, 3))
@settings(max_examples=60, deadline=None)
def test_ranks_get_equal_shares_of_the_work(samples: list[Lengths], num_ranks: int) -> None:
    """In each round the rank with the least gets the most, so that two ranks never differ by more than a microbatch."""
    for name, plan_of in PLANS.items():
        plan = plan_of(samples, TokenBudget(64, 1, num_ranks=num_ranks))
        loads = [sum(num_tokens(samples, part, name) for part in microbatches) for microbatches in plan]
        largest = max(num_tokens(samples, part, name) for microbatches in plan for part in microbatches)
        assert max(loads) - min(loads) <= largest


def test_samples_of_similar_length_are_padded_together() -> None:
    lengths = [[3], [30], [4], [31], [5], [29]]
    (rank,) = plan_padded(lengths, TokenBudget(96, 1))
    assert [(set(part.samples), part.width) for part in rank] == [({3, 1, 5}, 31), ({0, 2, 4}, 5)]
    (rank,) = plan_padded(lengths, TokenBudget(96, 16))
    assert [(set(part.samples), part.width) for part in rank] == [({3, 1, 5}, 32), ({0, 2, 4}, 16)]
    (rank,) = plan_padded(lengths, TokenBudget(70, "power_of_two"))
    assert [(set(part.samples), part.width) for part in rank] == [({3, 1}, 32), ({5, 4}, 32), ({0, 2}, 4)]


def test_one_shape_is_as_many_rows_as_fit_at_the_longest() -> None:
    (rank,) = plan_padded([[3], [30], [4], [31], [5]], TokenBudget(64, 1, one_shape=True))
    assert [(part.samples, part.num_filled, part.width) for part in rank] == [
        ((0, 1), 0, 31),
        ((2, 3), 0, 31),
        ((4,), 1, 31),
    ]


@pytest.mark.parametrize(("rounding", "expected"), [(1, 13), (8, 16), (13, 13), ("power_of_two", 16)])
def test_rounding(rounding: LengthRound, expected: int) -> None:
    assert rounded_length(13, rounding) == expected
    assert [rounded_length(length, "power_of_two") for length in (1, 2, 3, 4, 5)] == [1, 2, 4, 4, 8]


@pytest.mark.parametrize("name", BINS)
@given(sizes=st.lists(st.integers(1, 60), min_size=1, max_size=60))
@settings(max_examples=100, deadline=None)
def test_bins_hold_everything_within_their_capacity(name: str, sizes: list[int]) -> None:
    bins = BINS[name](sizes, 60)
    assert sorted(number for pack in bins for number in pack) == list(range(len(sizes)))
    assert all(sum(sizes[number] for number in pack) <= 60 for pack in bins)
    fewest = math.ceil(sum(sizes) / 60)
    # No two bins, and of `concatenative` no two neighbors, would fit into one.
    assert len(bins) <= 2 * fewest + 1


def test_each_heuristic_does_what_its_name_says() -> None:
    sizes = [6, 6, 3, 3, 1, 1]
    assert concatenative(sizes, 10) == [[0], [1, 2], [3, 4, 5]]
    assert first_fit_decreasing(sizes, 10) == [[0, 2, 4], [1, 3, 5]]
    assert modified_first_fit_decreasing(sizes, 10) == [[0, 2, 4], [1, 3, 5]]


def test_the_modified_heuristic_needs_fewer_bins_on_its_textbook_case() -> None:
    """Halves and a bit, thirds and a bit, sixths and a bit: pairs of sixths belong beside halves of less."""
    sizes = [51] * 6 + [27] * 6 + [26] * 6 + [23] * 12
    first, modified = first_fit_decreasing(sizes, 100), modified_first_fit_decreasing(sizes, 100)
    assert (len(modified), len(first)) == (10, 11)
