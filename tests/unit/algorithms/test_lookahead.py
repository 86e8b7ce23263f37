"""What may be generated ahead of training: the age's bound, and that each step's responses are trained once."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_offload.algorithms.lookahead import Lookahead


@given(first=st.integers(1, 5), num=st.integers(1, 12), max_age=st.integers(0, 4), seed=st.integers(0, 1_000_000))
def test_any_order_of_events_trains_each_step_once_and_nothing_too_old(
    first: int, num: int, max_age: int, seed: int
) -> None:
    rng, last = random.Random(seed), first + num - 1
    ahead = Lookahead[str](first, last, max_age)
    under_way: dict[int, int] = {}
    """The step, and the weights that began it."""
    began: list[int] = []
    trained: list[int] = []
    version, wishes = first - 1, 0
    while version < last:
        wishes += 1
        assert wishes < 10_000, "it always goes on"
        event = rng.choice(["start", "finish", "train"])
        if event == "start" and (step := ahead.start()) is not None:
            assert version <= step - 1 <= version + max_age
            began.append(step)
            under_way[step] = version
        elif event == "finish" and (unfinished := [step for step in under_way if not ahead.is_ready(step)]):
            step = rng.choice(unfinished)
            ahead.finish(step, f"of step {step}")
        elif event == "train" and ahead.is_ready(version + 1):
            result, age = ahead.take(version + 1)
            assert result == f"of step {version + 1}"
            assert age == version - under_way.pop(version + 1)
            assert 0 <= age <= max_age
            trained.append(version + 1)
            assert not ahead.is_ready(version + 1)
            ahead.renew()
            version += 1
        assert ahead.version == version
        assert ahead.num_under_way == sum(not ahead.is_ready(step) for step in under_way)
        assert ahead.waiting == [f"of step {step}" for step in sorted(under_way) if ahead.is_ready(step)]
    assert began == trained == list(range(first, last + 1))
    assert ahead.start() is None
    assert ahead.num_under_way == 0


@pytest.mark.parametrize("max_age", [0, 1, 3])
def test_as_much_begins_as_may(max_age: int) -> None:
    ahead = Lookahead[int](1, 10, max_age)
    started = []
    while (step := ahead.start()) is not None:
        started.append(step)
    assert started == list(range(1, max_age + 2))
    for step in reversed(started):
        ahead.finish(step, step)
    assert ahead.take(1) == (1, 0)
    ahead.renew()
    assert ahead.start() == max_age + 2
    assert ahead.start() is None


def test_a_step_is_taken_in_its_turn_alone_and_once() -> None:
    ahead = Lookahead[int](4, 9, 2)
    for _ in range(3):
        ahead.start()
    ahead.finish(5, 0)
    with pytest.raises(AssertionError, match="newest"):
        ahead.take(5)
    with pytest.raises(AssertionError, match="under way"):
        ahead.finish(5, 1)
    with pytest.raises(AssertionError, match="under way"):
        ahead.finish(8, 1)
    ahead.finish(4, 7)
    assert ahead.take(4) == (7, 0)
    with pytest.raises(KeyError):
        ahead.take(4)
