"""A user's function as an environment: what it may return, and how its mistakes are told."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_offload.config.loader import PROJECT_ROOT, load_config
from nemo_rl_offload.environments.function import FunctionEnvironment
from nemo_rl_offload.environments.interface import Episode, Score
from nemo_rl_offload.environments.pool import EnvironmentPool, make_environment
from nemo_rl_offload.errors import ConfigError, WorkerError

HERE = str(Path(__file__).parent)


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, HERE])


def step(name: str, response: str = "abcd", **params: Any) -> Score:
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": response}]
    (score,) = FunctionEnvironment(f"user_functions:{name}", params).step([Episode({"answer": "right"}, messages)])
    return score


def test_a_number_is_the_reward_and_ends_the_episode() -> None:
    assert step("shorter_is_better") == Score(0.25, is_correct=True, scorer_error=False)
    assert step("shorter_is_better", scale=0.0) == Score(0.0, is_correct=False, scorer_error=False)


def test_an_observation_goes_on_with_the_episode() -> None:
    assert step("try_again") == Score(0.0, is_correct=False, scorer_error=False, observation="Wrong. Again: ")
    assert step("try_again", "right") == Score(1.0, is_correct=True, scorer_error=False)


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        (True, Score(1.0, True, False)),
        ({"reward": 2}, Score(2.0, True, False)),
        ({"reward": -1, "is_correct": True}, Score(-1.0, True, False)),
        ({"reward": 1, "observation": "x"}, Score(1.0, True, False, "x")),
        ({"reward": 1, "observation": "x", "done": True}, Score(1.0, True, False)),
    ],
)
def test_what_may_be_returned(returned: Any, expected: Score) -> None:
    assert step("returns", what=returned) == expected


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (None, "returned None"),
        ("good", "returned 'good'"),
        (float("nan"), "the reward must be finite"),
        ({"score": 1}, "unknown keys \\['score'\\]; allowed: reward, observation, done, is_correct"),
        ({"observation": "x"}, "the key reward is missing"),
        ({"reward": 1, "observation": 3}, "observation must be text or None"),
        ({"reward": 1, "done": False}, "needs an observation"),
    ],
)
def test_what_may_not_be_returned(returned: Any, words: str) -> None:
    with pytest.raises(WorkerError, match=rf"env\.function\.path: user_functions:returns .*{words}.*was 'abcd'"):
        step("returns", what=returned)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("no_such_module:f", "'no_such_module' does not import: ModuleNotFoundError: No module named"),
        ("user_functions:try_agian", r"user_functions.py\) has no function 'try_agian'. Did you mean 'try_again'"),
        ("user_functions:NOT_CALLABLE", "has no function 'NOT_CALLABLE'"),
    ],
)
def test_a_function_that_is_not_there(function: str, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"env\.function\.path: .*{words}"):
        FunctionEnvironment(function, {})


@pytest.fixture
def make(ray_cluster: None) -> Iterator[Callable[..., EnvironmentPool]]:
    """Start actors for a function of `user_functions`."""
    pools = []

    def start(name: str, *overrides: str) -> EnvironmentPool:
        function = [f"env.function.path=user_functions:{name}", "data.env_name=function", *overrides]
        config: Any = load_config(PROJECT_ROOT / "examples/configs/grpo_tiny.yaml", function)
        pools.append(make_environment(config))
        return pools[-1]

    yield start
    for pool in pools:
        pool.shutdown()


def episodes(*responses: str) -> list[Episode]:
    return [Episode({"answer": "right"}, [{"role": "assistant", "content": text}]) for text in responses]


def test_actors_call_it(make: Callable[..., EnvironmentPool]) -> None:
    pool = make("shorter_is_better", "env.function.num_workers=2", "env.function.params={scale:2.0}")
    assert [score.reward for score in pool.step(episodes("a", "ab", "abcd"))] == [2.0, 1.0, 0.5]


def test_its_exception_is_told_with_place_and_response(make: Callable[..., EnvironmentPool]) -> None:
    with pytest.raises(WorkerError) as caught:
        make("fails").step(episodes("what it read"))
    text = str(caught.value)
    assert text.startswith("env.function.path: user_functions:fails raised KeyError: 'no such thing' (")
    assert "user_functions.py:" in text
    assert "The response was 'what it read'." in text
    assert "\n" not in text
    assert 'raise KeyError("no such thing")' in caught.value.details


def test_one_that_does_not_return_is_told(make: Callable[..., EnvironmentPool]) -> None:
    pool = make("sleeps", "env.function.timeout_s=1.5", "env.function.num_workers=2")
    assert pool.step(episodes("fast", "fast"))
    with pytest.raises(WorkerError, match=r"2 of 4 responses were not scored within timeout_s 1\.5"):
        pool.step(episodes("fast", "fast", "slow", "fast"))
