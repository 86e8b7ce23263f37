"""Figures of an evaluation, against all choices of k responses."""

from itertools import combinations
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_offload.algorithms.evaluation import evaluated, pass_at_k
from nemo_rl_offload.algorithms.rollout import Rollout
from nemo_rl_offload.batching.response import Response
from nemo_rl_offload.data.prompts import Prompt
from nemo_rl_offload.data.reasoning_gym import Problem
from nemo_rl_offload.environments.interface import Score

PROMPT = Prompt(Problem("1+1?", "2", {}), [5, 6, 7])


def by_choices(are_right: list[bool], k: int) -> float:
    return fmean(any(chosen) for chosen in combinations(are_right, k))


@given(st.lists(st.booleans(), min_size=1, max_size=7), st.data())
def test_pass_at_k_is_the_mean_over_all_choices(are_right: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(are_right)))
    assert pass_at_k(sum(are_right), len(are_right), k) == pytest.approx(by_choices(are_right, k), abs=1e-12)


@given(st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1, max_size=5), st.integers(1, 3))
def test_figures_are_means_over_problems(are_right: list[list[bool]], k: int) -> None:
    scores = [Score(2.0 * each, each, scorer_error=False) for problem in are_right for each in problem]
    responses = [Response([1, 2], [0.0, 0.0], finished=each.is_correct) for each in scores]
    found = evaluated(Rollout([PROMPT] * len(scores), responses, scores), 3, k, "a model", 1.5)
    chances = [by_choices(problem, k) for problem in are_right]
    assert found["pass_at_k"] == pytest.approx(fmean(chances))
    assert found["accuracy"] == pytest.approx(fmean(score.is_correct for score in scores))
    assert found["reward"] == pytest.approx(2 * found["accuracy"])
    assert found["unfinished_fraction"] == pytest.approx(1 - found["accuracy"])
    assert (found["num_problems"], found["num_tests_per_prompt"], found["k_value"]) == (len(are_right), 3, k)
    assert (found["standard_error"] is None) == (len(are_right) == 1)
    if found["standard_error"] is not None:
        spread = sum((each - fmean(chances)) ** 2 for each in chances) / (len(chances) - 1) / len(chances)
        assert found["standard_error"] ** 2 == pytest.approx(spread, abs=1e-12)
