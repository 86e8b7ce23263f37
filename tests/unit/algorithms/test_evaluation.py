"""Figures of an evaluation, against all choices of k responses."""

from itertools import combinations
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_offload.algorithms.evaluation import cons_at_k, evaluated, pass_at_k
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


def by_hand(answers: str, right: str, k: int) -> float:
    """A letter is an answer, `-` none; what is most frequent is looked for by sorting."""
    choices = list(combinations(answers, k))
    won = [sorted(chosen, key=lambda each: (-chosen.count(each), chosen.index(each)))[0] for chosen in choices]
    return sum(answer == right for answer in won) / len(choices)


@given(st.text("AB-", min_size=1, max_size=7), st.data())
def test_cons_at_k_is_the_share_of_choices_that_vote_for_what_is_right(answers: str, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(answers)))
    scores = [Score(0.0, each == "A", scorer_error=False, answer=None if each == "-" else each) for each in answers]
    assert cons_at_k(scores, k) == pytest.approx(by_hand(answers, "A", k), abs=1e-12)


VOTES = [("AAB", 3, 1.0), ("ABB", 3, 0.0), ("AB", 2, 1.0), ("BA", 2, 0.0), ("A--", 3, 0.0), ("AAB", 1, 2 / 3)]


@pytest.mark.parametrize(("answers", "k", "share"), [*VOTES, ("ABC", 2, 2 / 3)])
def test_votes(answers: str, k: int, share: float) -> None:
    """Of as frequent answers the first counts, and to have none is one of them."""
    scores = [Score(0.0, each == "A", scorer_error=False, answer=None if each == "-" else each) for each in answers]
    num = len(scores)
    played = Rollout([PROMPT] * num, [Response([1], [0.0], finished=True)] * num, scores)
    found = evaluated(played, num, k, "a model", 1.0, votes=True)
    assert found["cons_at_k"] == pytest.approx(share)
    assert found["cons_standard_error"] is None
    assert "cons_at_k" not in evaluated(played, num, k, "a model", 1.0)


def test_an_answer_is_as_right_as_the_first_response_that_has_it() -> None:
    scores = [Score(0.0, is_right, scorer_error=False, answer="A") for is_right in (False, True)]
    assert cons_at_k(scores, 2) == 0
