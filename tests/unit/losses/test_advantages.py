"""Advantages against numpy, one sample at a time."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_offload.losses.advantages import group_advantages, has_signal, overlong_penalty

GROUPS = st.integers(2, 6).flatmap(
    lambda size: st.lists(
        st.lists(st.sampled_from([0.0, 0.1, 0.3, 0.7, 1.0]), min_size=size, max_size=size),
        min_size=1,
        max_size=4,
    )
)


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
        for i, reward in enumerate(group):
            compared = [r for j, r in enumerate(group) if j != i or not leave_one_out]
            mean = np.mean(compared)
            deviation = np.std(compared, ddof=1) if len(set(compared)) > 1 else 0.0
            expected = (reward - mean) / (deviation + 1e-6) if normalize and deviation else reward - mean
            assert baseline[position].item() == pytest.approx(mean, abs=1e-6)
            assert std[position].item() == pytest.approx(deviation, abs=1e-6)
            assert advantages[position].item() == pytest.approx(expected, rel=1e-5, abs=1e-6)
            position += 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("leave_one_out", [True, False])
def test_equal_rewards_give_exactly_zero_advantage_and_deviation(leave_one_out: bool, dtype: torch.dtype) -> None:
    advantages, _, std = group_advantages(
        torch.full((14,), 0.1, dtype=dtype), 7, normalize=True, leave_one_out=leave_one_out
    )
    assert (std == 0).all()
    assert (advantages == 0).all()


@given(num_others=st.integers(1, 40), low=st.floats(0, 0.5, width=32))
@settings(max_examples=50, deadline=None)
def test_the_only_success_of_a_group_is_not_sharpened(num_others: int, low: float) -> None:
    rewards = torch.tensor([low] * num_others + [1.0])
    advantages, _, std = group_advantages(rewards, num_others + 1, normalize=True, leave_one_out=True)
    assert std[-1].item() == 0
    assert advantages[-1].item() == pytest.approx(1 - low, rel=1e-6)


def test_a_single_generation_gives_no_advantage() -> None:
    rewards = torch.tensor([0.0, 1.0])
    advantages, baseline, std = group_advantages(rewards, 1, normalize=True, leave_one_out=False)
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
