"""Rewards come from the task's own scorer; a pool of actors gives what one environment gives."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from nemo_rl_offload.config.schema import ReasoningGymConfig
from nemo_rl_offload.data.reasoning_gym import ReasoningGymProblems
from nemo_rl_offload.environments.reasoning_gym import (
    EnvironmentPool,
    ReasoningGymEnvironment,
    Score,
    make_environment,
)
from nemo_rl_offload.errors import WorkerError

SHORT = {"min_word_len": 3, "max_word_len": 5}
WRONG = Score(0.0, is_correct=False, scorer_error=False)
RIGHT = Score(1.0, is_correct=True, scorer_error=False)


def entries(task: str, params: dict[str, Any], size: int) -> list[dict[str, Any]]:
    return [problem.entry for problem in ReasoningGymProblems(task, params, 0, size)]


def environment(task: str, params: dict[str, Any], binary: bool = True, threshold: float = 0.999) -> Any:
    return ReasoningGymEnvironment(task, params, binary_reward=binary, correct_threshold=threshold)


def test_binary_reward_needs_the_threshold_and_an_end() -> None:
    items = entries("spell_backward", SHORT, 3)
    answers = [item["answer"] for item in items]
    env = environment("spell_backward", SHORT)
    assert env.score(items, answers, [True, True, False]) == [RIGHT, RIGHT, WRONG]
    assert env.score(items, [answer + "x" for answer in answers], [True] * 3) == [WRONG] * 3


def test_partial_credit_is_the_reward_unless_binary() -> None:
    item = next(item for item in entries("spell_backward", SHORT, 50) if len(item["answer"]) == 4)
    almost = item["answer"][:3] + "!"
    scores = {
        (binary, threshold): environment("spell_backward", SHORT, binary, threshold).score([item], [almost], [True])[0]
        for binary in (True, False)
        for threshold in (0.5, 0.999)
    }
    assert scores[True, 0.999] == WRONG
    assert scores[True, 0.5] == RIGHT
    assert scores[False, 0.999] == Score(0.75, is_correct=False, scorer_error=False)
    assert scores[False, 0.5] == Score(0.75, is_correct=True, scorer_error=False)


def test_a_scorer_that_fails_on_a_response_counts_as_wrong_and_is_reported() -> None:
    items = entries("prime_factorization", {}, 2)
    responses = ["no numbers here", items[1]["answer"]]
    scores = environment("prime_factorization", {}).score(items, responses, [True, True])
    assert scores == [Score(0.0, is_correct=False, scorer_error=True), RIGHT]


@pytest.fixture(scope="module")
def pool() -> Iterator[EnvironmentPool]:
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    config: ReasoningGymConfig = {
        "task": "spell_backward",
        "params": SHORT,
        "num_workers": 2,
        "binary_reward": True,
        "correct_threshold": 0.999,
    }
    yield make_environment(config)
    ray.shutdown()


@pytest.mark.parametrize("size", [1, 5, 6])
def test_the_pool_keeps_the_order(pool: EnvironmentPool, size: int) -> None:
    items = entries("spell_backward", SHORT, size)
    responses = [item["answer"] if i % 2 else "wrong" for i, item in enumerate(items)]
    expected = environment("spell_backward", SHORT).score(items, responses, [True] * size)
    assert pool.score(items, responses, [True] * size) == expected


def test_a_dead_actor_is_one_worker_error(pool: EnvironmentPool) -> None:
    pool.shutdown()
    items = entries("spell_backward", SHORT, 2)
    with pytest.raises(WorkerError, match="environment worker died"):
        pool.score(items, ["a", "b"], [True, True])
