"""A user's function as an environment: what it may return, and how its mistakes are told."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nemo_rl_offload.environments.function import FunctionEnvironment
from nemo_rl_offload.environments.interface import Episode, Score
from nemo_rl_offload.environments.pool import EnvironmentPool
from nemo_rl_offload.errors import ConfigError, WorkerError
from nemo_rl_offload.specs.reward_functions import CALL

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
        ({"rewards": {"a": 1, "b": 0.5}}, Score(1.5, True, False, parts={"a": 1.0, "b": 0.5})),
        ({"rewards": {"a": 1, "b": 2}, "reward": 0}, Score(0.0, False, False, parts={"a": 1.0, "b": 2.0})),
        ({"reward": 1, "observation": "x", "done": True}, Score(1.0, True, False)),
        ({"reward": 1, "observation": "x", "done": 0}, Score(1.0, True, False, "x")),
        ({"reward": np.float32(0.5), "is_correct": np.bool_(False)}, Score(0.5, False, False)),
        (-1e18, Score(-1e18, False, False)),
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
        ({"rewards": None}, "the key reward is missing, and rewards is None"),
        ({"rewards": 1}, "rewards must be a mapping of names to numbers"),
        ({"rewards": {}}, "rewards must be a mapping of names to numbers"),
        ({"rewards": {"a": float("nan")}}, "the reward must be finite"),
        ({"rewards": {"a": "0.5"}}, "a reward must be a number, not text"),
        ("1.0", "returned '1.0'.*a reward must be a number, not text"),
        (b"1", "a reward must be a number, not text"),
        ({"reward": 1, "is_correct": "false"}, "is_correct must be True or False"),
        ({"reward": 1, "is_correct": None}, "is_correct must be True or False"),
        ({"reward": 1, "is_correct": float("nan")}, "is_correct must be True or False"),
        ({"reward": 1, "observation": "x", "done": "false"}, "done must be True or False"),
        (10**400, "int too large to convert to float"),
        (1e39, "the reward must be finite, and between -1e\\+18 and 1e\\+18"),
        ({"rewards": {"a": 1e300, "b": -1e300}}, "the reward must be finite"),
        ({"score": 1}, "unknown keys \\['score'\\]; allowed: reward, rewards, observation, done, is_correct"),
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
        ("exits_when_imported:f", "'exits_when_imported' does not import: SystemExit: 3"),
    ],
)
def test_a_function_that_is_not_there(
    function: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "exits_when_imported.py").write_text("import sys; sys.exit(3)")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=rf"env\.function\.path: .*{words}"):
        FunctionEnvironment(function, {})


def test_processes_call_it(make_pool: Callable[..., EnvironmentPool]) -> None:
    pool = make_pool(
        "data.env_name=function",
        "env.function.path=user_functions:shorter_is_better",
        "env.function.num_workers=2",
        "env.function.params={scale:2.0}",
    )
    asked = [Episode({}, [{"role": "assistant", "content": text}]) for text in ("a", "ab", "abcd")]
    assert [score.reward for score in pool.step(asked)] == [2.0, 1.0, 0.5]


@pytest.mark.parametrize(
    ("function", "params", "words"),
    [
        ("user_functions:takes_one_argument", {}, "too many positional arguments"),
        ("operator:truth", {}, "too many positional arguments"),
        ("user_functions:as_in_trl", {}, r"def score\(messages, entry\): return "),
        ("user_functions:shorter_is_better", {"scael": 1}, "unexpected keyword argument 'scael'"),
    ],
)
def test_one_that_takes_other_arguments_is_refused_before_the_run(
    function: str, params: dict[str, Any], words: str
) -> None:
    section: Any = {"path": function, "params": params, "num_workers": 1}
    expected = rf"env\.function\.path: {function}\(.*cannot be called as function\(messages, entry, .*{words}"
    with pytest.raises(ConfigError, match=expected):
        FunctionEnvironment.prepare(section)


def test_one_of_trls_is_adapted_as_the_message_says() -> None:
    def of_text(prompts: list[str], completions: list[str], answer: list[str]) -> list[float]:
        assert prompts == ["2 + 2"]
        return [float(each == right) for each, right in zip(completions, answer, strict=True)]

    def of_messages(prompts: list[Any], completions: list[Any], answer: list[str]) -> list[float]:
        assert prompts == [asked[:1]]
        return [float(each[0]["content"] == right) for each, right in zip(completions, answer, strict=True)]

    asked = [{"role": "user", "content": "2 + 2"}, {"role": "assistant", "content": "4"}]
    text, _, messages = CALL.partition("def score")[2].partition("; one that reads messages gets ")
    arguments = text[text.index("prompts=") : text.index(", **{key")]
    for reward, adapter in ((of_text, text), (of_messages, text.replace(arguments, messages))):
        names: dict[str, Any] = {"reward": reward}
        exec("def score" + adapter, names)
        assert [names["score"](asked, {"answer": answer}) for answer in ("4", "5")] == [1.0, 0.0]


def test_one_that_tells_nothing_of_its_arguments_is_tried() -> None:
    section: Any = {"path": "builtins:max", "params": {}, "num_workers": 1}
    assert FunctionEnvironment.prepare(section)["path"] == "builtins:max"
