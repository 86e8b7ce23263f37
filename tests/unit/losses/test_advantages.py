"""Advantages against numpy, one group at a time, and their bounds."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_offload.losses.advantages import (
    EPSILON,
    decoupled_advantages,
    group_advantages,
    has_signal,
    overlong_penalty,
    scaled_rewards,
    token_advantages,
)

GROUPS = st.integers(2, 6).flatmap(
    lambda size: st.lists(
        st.lists(st.sampled_from([0.0, 0.1, 0.3, 0.7, 1.0]), min_size=size, max_size=size),
        min_size=1,
        max_size=4,
    )
)
REWARDS = st.lists(
    st.one_of(
        st.sampled_from([0.0, 1.0, 1e-4, 1e-3, 0.3, 1e-7, -1.0, 1e6]),
        st.floats(-1e8, 1e8, width=32),
        st.floats(0, 1, width=32),
    ),
    min_size=2,
    max_size=16,
)


def advantages_of(rewards: list[float], *, normalize: bool = True, leave_one_out: bool = True) -> list[float]:
    values = torch.tensor(rewards, dtype=torch.float64)
    advantages, _, _ = group_advantages(values, len(rewards), normalize=normalize, leave_one_out=leave_one_out)
    return advantages.tolist()


@given(groups=GROUPS, normalize=st.booleans(), leave_one_out=st.booleans())
@settings(max_examples=80, deadline=None)
def test_matches_numpy(groups: list[list[float]], normalize: bool, leave_one_out: bool) -> None:
    rewards = torch.tensor(groups).flatten()
    advantages, baseline, std = group_advantages(
        rewards, len(groups[0]), normalize=normalize, leave_one_out=leave_one_out
    )
    assert advantages.dtype == baseline.dtype == std.dtype == torch.float32
    position = 0
    for group in groups:
        deviation = np.std(group, ddof=1) if len(set(group)) > 1 else 0.0
        for i, reward in enumerate(group):
            mean = np.mean([r for j, r in enumerate(group) if j != i or not leave_one_out])
            expected = (reward - mean) / (deviation + 1e-6) if normalize else reward - mean
            assert baseline[position].item() == pytest.approx(mean, abs=1e-6)
            assert std[position].item() == pytest.approx(deviation, abs=1e-6)
            assert advantages[position].item() == pytest.approx(expected, rel=1e-5, abs=1e-6)
            position += 1


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([0, 0, 0.001, 1], [-0.667554, -0.667554, -0.664887, 1.999995]),
        ([0, 0, 0, 10], [-2 / 3, -2 / 3, -2 / 3, 2]),
        ([0, 1], [-math.sqrt(2), math.sqrt(2)]),
        ([0, 0.95, 0.95, 0.95, 0.95, 0.95, 0.95, 0.95], [-math.sqrt(8)] + [math.sqrt(8) / 7] * 7),
        ([0] * 6 + [0.0001, 1], [-0.404101] * 6 + [-0.403778, 2.828427]),
        ([-1.5, -1.5, -1.5, 0.5], [-2 / 3, -2 / 3, -2 / 3, 2]),
    ],
    ids=str,
)
def test_one_divisor_a_group(rewards: list[float], expected: list[float]) -> None:
    assert advantages_of(rewards) == pytest.approx(expected, abs=2e-5)


@given(rewards=REWARDS, leave_one_out=st.booleans())
@settings(max_examples=300, deadline=None)
def test_advantages_are_bounded_ordered_and_sum_to_zero(rewards: list[float], leave_one_out: bool) -> None:
    size = len(rewards)
    advantages = advantages_of(rewards, leave_one_out=leave_one_out)
    bound = (size - 1) / math.sqrt(size) * (size / (size - 1) if leave_one_out else 1)
    assert max(map(abs, advantages)) <= bound * (1 + 1e-6)
    assert sum(advantages) == pytest.approx(0, abs=1e-4)
    ranked = [advantage for _, advantage in sorted(zip(rewards, advantages, strict=True))]
    assert all(lower <= upper + 1e-6 for lower, upper in pairwise(ranked))


@given(rewards=REWARDS, leave_one_out=st.booleans())
@settings(max_examples=100, deadline=None)
def test_normalizing_divides_all_of_a_group_by_the_same(rewards: list[float], leave_one_out: bool) -> None:
    values = torch.tensor(rewards)
    plain, _, std = group_advantages(values, len(rewards), normalize=False, leave_one_out=leave_one_out)
    divided, _, _ = group_advantages(values, len(rewards), normalize=True, leave_one_out=leave_one_out)
    assert len(set(std.tolist())) == 1
    torch.testing.assert_close(divided * (std + EPSILON), plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("leave_one_out", [True, False])
def test_equal_rewards_give_exactly_zero_advantage_and_deviation(leave_one_out: bool, dtype: torch.dtype) -> None:
    advantages, _, std = group_advantages(
        torch.full((14,), 0.1, dtype=dtype), 7, normalize=True, leave_one_out=leave_one_out
    )
    assert (std == 0).all()
    assert (advantages == 0).all()


NOISE = [
    [0.1 + 0.2, 0.3, 0.3, 0.3],
    [0.1 + 0.2 - 0.3, 0.0, 0.0],
    [0.0, 0.0, 1e-7],
    [100.1 + 0.2, 100.3, float(np.float32(100.1) + np.float32(0.2))],
    [1e6, 1e6 + 0.0625, 1e6],
    [-0.7 + float(np.float32(0.4)), -0.3, -0.3],
]
SIGNAL = [[0.0, 0.0, 1e-5], [0.3, 0.3, 0.30001], [1e6, 1e6 + 10, 1e6], [0.0, 0.0, 0.001, 1.0], [-0.3, -0.2]]


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("leave_one_out", [True, False])
@pytest.mark.parametrize(
    ("rewards", "expected"), [*((group, False) for group in NOISE), *((group, True) for group in SIGNAL)], ids=str
)
def test_rounding_is_no_signal(rewards: list[float], expected: bool, leave_one_out: bool, normalize: bool) -> None:
    advantages = advantages_of(rewards, normalize=normalize, leave_one_out=leave_one_out)
    assert any(advantages) is expected
    assert has_signal(torch.tensor(rewards, dtype=torch.float64)) is expected


@given(rewards=REWARDS)
@settings(max_examples=100, deadline=None)
def test_a_group_has_signal_where_it_is_divided(rewards: list[float]) -> None:
    values = torch.tensor(rewards)
    advantages, _, std = group_advantages(values, len(rewards), normalize=True, leave_one_out=True)
    assert has_signal(values) is bool((std > 0).all()) is bool((advantages != 0).any())


def test_a_group_without_signal_does_not_touch_its_neighbours() -> None:
    rewards = [0.1 + 0.2, 0.3, 0.3, 0.0, 0.0, 0.6]
    advantages, _, std = group_advantages(torch.tensor(rewards), 3, normalize=True, leave_one_out=True)
    assert advantages[:3].tolist() == std[:3].tolist() == [0, 0, 0]
    assert advantages[3:].tolist() == pytest.approx(advantages_of(rewards[3:]))


def test_shaped_rewards_are_divided_by_their_own_deviation() -> None:
    rewards = torch.tensor([1.0, 1.0, 1.0, 1.0])
    shaped = rewards - overlong_penalty(torch.tensor([8, 8, 8, 9]), longest=1008, buffer=1000, penalty=1.0)
    advantages = advantages_of(shaped.tolist())
    assert advantages == pytest.approx([2 / 3, 2 / 3, 2 / 3, -2], rel=5e-3)
    equal = rewards - overlong_penalty(torch.tensor([500, 500, 500, 500]), longest=1008, buffer=1000, penalty=0.3)
    assert advantages_of(equal.tolist()) == [0, 0, 0, 0]


def test_a_reward_that_is_no_number_shows() -> None:
    assert all(map(math.isnan, advantages_of([math.nan, 0.0, 1.0])))
    assert has_signal(torch.tensor([0.0, math.nan]))


@pytest.mark.parametrize("leave_one_out", [True, False])
def test_a_single_generation_gives_no_advantage(leave_one_out: bool) -> None:
    rewards = torch.tensor([0.0, 1.0])
    advantages, baseline, std = group_advantages(rewards, 1, normalize=True, leave_one_out=leave_one_out)
    assert advantages.tolist() == std.tolist() == [0.0, 0.0]
    assert baseline.tolist() == rewards.tolist()


def test_overlong_penalty_grows_over_the_buffer() -> None:
    penalties = overlong_penalty(torch.tensor([1, 8, 9, 10, 12, 13]), longest=12, buffer=4, penalty=2.0)
    assert penalties.tolist() == [0, 0, 0.5, 1.0, 2.0, 2.0]


@pytest.mark.parametrize(("rewards", "expected"), [([1, 1, 1], False), ([0.1] * 7, False), ([0, 0, 1], True)])
def test_has_signal(rewards: list[float], expected: bool) -> None:
    values = torch.tensor(rewards, dtype=torch.float32)
    assert has_signal(values) is expected
    advantages, _, _ = group_advantages(values, len(rewards), normalize=False, leave_one_out=True)
    assert bool((advantages != 0).any()) is expected


@given(
    parts=st.integers(2, 5).flatmap(
        lambda size: st.lists(
            st.lists(
                st.lists(st.sampled_from([0.0, 0.1, 0.3, 1.0]), min_size=size, max_size=size), min_size=2, max_size=2
            ),
            min_size=2,
            max_size=3,
        )
    ),
    normalize=st.booleans(),
    leave_one_out=st.booleans(),
)
@settings(max_examples=30, deadline=None)
def test_several_rewards_against_numpy(parts: list[list[list[float]]], normalize: bool, leave_one_out: bool) -> None:
    """Each compared in its groups, added up by weight, then mean 0 and deviation 1 over the batch."""
    weights, size = [0.5, 2.0, 1.0][: len(parts)], len(parts[0][0])
    sums = np.zeros(2 * size)
    for weight, groups in zip(weights, parts, strict=True):
        for number, group in enumerate(groups):
            for i, reward in enumerate(group):
                others = [r for j, r in enumerate(group) if j != i or not leave_one_out]
                deviation = np.std(group, ddof=1) + 1e-6 if normalize and len(set(group)) > 1 else 1.0
                sums[number * size + i] += weight * (reward - np.mean(others)) / deviation
    deviation = np.std(sums, ddof=1)
    expected = (sums - sums.mean()) / (deviation if deviation > 1e-6 else 1.0)
    got = decoupled_advantages(
        torch.tensor(parts).flatten(1).T, torch.tensor(weights), size, normalize=normalize, leave_one_out=leave_one_out
    )
    assert got.dtype == torch.float32
    np.testing.assert_allclose(got.numpy(), expected, atol=2e-4)


def test_rewards_whose_totals_are_equal_still_have_a_signal() -> None:
    """Right but long, and wrong but short: the total is the same, and GRPO learns nothing."""
    parts = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 0.0]])
    assert not has_signal(parts.sum(dim=1))
    advantages = decoupled_advantages(parts, torch.tensor([2.0, 1.0]), 4, normalize=True, leave_one_out=False)
    assert advantages[1] < 0 < advantages[0]


@given(
    rewards=st.lists(st.floats(-5, 5, width=32), min_size=1, max_size=6),
    source=st.tuples(st.floats(-3, 0, width=32), st.floats(1, 3, width=32)),
    target=st.tuples(st.floats(-2, 0, width=32), st.floats(0.5, 4, width=32)),
)
@settings(max_examples=50, deadline=None)
def test_scaled_rewards_are_numpys_interpolation(
    rewards: list[float], source: tuple[float, float], target: tuple[float, float]
) -> None:
    got = scaled_rewards(torch.tensor(rewards), source, target)
    np.testing.assert_allclose(got.numpy(), np.interp(rewards, source, target), atol=1e-5)


@given(
    rewards=st.lists(st.lists(st.floats(-2, 2, width=32), min_size=3, max_size=3), min_size=1, max_size=3),
    minus_baseline=st.booleans(),
    has_kl=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=50, deadline=None)
def test_token_advantages_against_numpy(
    rewards: list[list[float]], minus_baseline: bool, has_kl: bool, seed: int
) -> None:
    """Of tokens that count: mean 0 and variance 1, whatever the others hold."""
    draw = np.random.default_rng(seed)
    size = 3 * len(rewards), 5
    mask, kl = draw.random(size) < 0.6, draw.random(size)
    groups = np.array(rewards)
    compared = (groups - groups.mean(axis=1, keepdims=True) if minus_baseline else groups).flatten()
    values = np.repeat(compared[:, None], size[1], axis=1) - (kl if has_kl else 0.0)
    expected = np.zeros(size)
    if mask.any():
        chosen = values[mask]
        expected[mask] = (chosen - chosen.mean()) / np.sqrt(max(chosen.var(), 1e-8))
    got = token_advantages(
        torch.tensor(rewards).flatten(),
        3,
        torch.tensor(mask),
        minus_baseline=minus_baseline,
        kl=torch.tensor(kl) if has_kl else None,
    )
    np.testing.assert_allclose(got.numpy(), expected, atol=1e-3)
