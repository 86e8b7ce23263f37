"""Rewards come from the task's own scorer; a pool of processes gives what one environment gives."""

from collections.abc import Callable
from typing import Any

import pytest

from nemo_rl_offload.data.reasoning_gym import ReasoningGymProblems
from nemo_rl_offload.environments.interface import UNFINISHED, Episode, Score
from nemo_rl_offload.environments.pool import EnvironmentPool
from nemo_rl_offload.environments.reasoning_gym import ReasoningGymEnvironment

SHORT = {"min_word_len": 3, "max_word_len": 5}
WRONG = Score(0.0, is_correct=False, scorer_error=False)
RIGHT = Score(1.0, is_correct=True, scorer_error=False)


def entries(task: str, params: dict[str, Any], size: int) -> list[dict[str, Any]]:
    return [problem.entry for problem in ReasoningGymProblems(task, params, 0, size)]


def environment(task: str, params: dict[str, Any], binary: bool = True, threshold: float = 0.999) -> Any:
    return ReasoningGymEnvironment(task, params, binary_reward=binary, correct_threshold=threshold)


def episodes(items: list[dict[str, Any]], responses: list[str]) -> list[Episode]:
    return [
        Episode(item, [{"role": "user", "content": "?"}, {"role": "assistant", "content": response}])
        for item, response in zip(items, responses, strict=True)
    ]


def test_binary_reward_needs_the_threshold() -> None:
    items = entries("spell_backward", SHORT, 3)
    answers = [item["answer"] for item in items]
    env = environment("spell_backward", SHORT)
    assert env.step(episodes(items, answers)) == [RIGHT] * 3
    assert env.step(episodes(items, [answer + "x" for answer in answers])) == [WRONG] * 3


def test_partial_credit_is_the_reward_unless_binary() -> None:
    item = next(item for item in entries("spell_backward", SHORT, 50) if len(item["answer"]) == 4)
    almost = item["answer"][:3] + "!"
    scores = {
        (binary, threshold): environment("spell_backward", SHORT, binary, threshold).step(episodes([item], [almost]))[0]
        for binary in (True, False)
        for threshold in (0.5, 0.999)
    }
    assert scores[True, 0.999] == WRONG
    assert scores[True, 0.5] == RIGHT
    assert scores[False, 0.999] == Score(0.75, is_correct=False, scorer_error=False)
    assert scores[False, 0.5] == Score(0.75, is_correct=True, scorer_error=False)


@pytest.fixture(scope="module")
def pool(make_pool: Callable[..., EnvironmentPool]) -> EnvironmentPool:
    return make_pool("env.reasoning_gym.num_workers=2")


@pytest.mark.slow
def test_a_scorer_that_fails_on_a_response_counts_as_wrong_and_is_reported(
    make_pool: Callable[..., EnvironmentPool],
) -> None:
    items = entries("prime_factorization", {}, 2)
    pool = make_pool(
        "env.reasoning_gym.task=prime_factorization",
        "~env.reasoning_gym.params.min_word_len",
        "~env.reasoning_gym.params.max_word_len",
    )
    scores = pool.step(episodes(items, ["no numbers here", items[1]["answer"]]))
    assert scores == [Score(0.0, is_correct=False, scorer_error=True), RIGHT]
    assert "env.reasoning_gym: the scorer raised ValueError" in pool.notices()[0]


@pytest.mark.parametrize("score", [float("nan"), float("inf")])
def test_a_score_that_is_no_number_is_no_reward(score: float, monkeypatch: pytest.MonkeyPatch) -> None:
    items = entries("spell_backward", SHORT, 1)
    env = environment("spell_backward", SHORT, binary=False)
    monkeypatch.setattr(env._dataset, "score_answer", lambda answer, entry: score)
    with pytest.raises(ValueError, match="score is"):
        env.step(episodes(items, ["x"]))


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 5, 6])
def test_the_pool_keeps_the_order(pool: EnvironmentPool, size: int) -> None:
    items = entries("spell_backward", SHORT, size)
    responses = [item["answer"] if i % 2 else "wrong" for i, item in enumerate(items)]
    asked = episodes(items, responses)
    assert pool.step(asked) == environment("spell_backward", SHORT).step(asked)


def test_an_unfinished_response_is_worth_nothing(pool: EnvironmentPool) -> None:
    items = entries("spell_backward", SHORT, 3)
    first, second, third = episodes(items, [item["answer"] for item in items])
    assert pool.step([first, second._replace(finished=False), third]) == [RIGHT, UNFINISHED, RIGHT]
    assert pool.step([first._replace(finished=False)]) == [UNFINISHED]
