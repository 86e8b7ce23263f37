"""Problems are reproducible, and mistakes in task or parameters are worded for the user."""

from typing import Any

import pytest

from nemo_rl_offload.data.reasoning_gym import ReasoningGymProblems
from nemo_rl_offload.errors import DataError

SHORT = {"min_word_len": 3, "max_word_len": 5}


def questions(task: str, params: dict[str, Any], seed: int, size: int) -> list[str]:
    return [problem.question for problem in ReasoningGymProblems(task, params, seed, size)]


def test_problems_depend_on_seed_and_index_alone() -> None:
    problems = ReasoningGymProblems("spell_backward", SHORT, seed=7, size=20)
    assert len(problems) == 20
    assert [problem.question for problem in problems] == questions("spell_backward", SHORT, 7, 20)
    assert problems[13] == ReasoningGymProblems("spell_backward", SHORT, 7, 20)[13]
    assert questions("spell_backward", SHORT, 8, 20) != questions("spell_backward", SHORT, 7, 20)
    for problem in problems:
        word = problem.question.rsplit(" ", 1)[1]
        assert 3 <= len(word) <= 5
        assert problem.answer == word[::-1]
        assert problem.entry["answer"] == problem.answer
    with pytest.raises(IndexError):
        problems[20]


def test_composite_tasks_are_configured_with_plain_mappings() -> None:
    parts: list[dict[str, Any]] = [
        {"name": name, "weight": 1.0, "config": {}} for name in ("chain_sum", "spell_backward")
    ]
    problems = ReasoningGymProblems("composite", {"datasets": parts}, 0, 30)
    assert {problem.entry["metadata"]["source_dataset"] for problem in problems} == {
        "chain_sum",
        "spell_backward",
    }


@pytest.mark.parametrize(
    ("task", "params", "words"),
    [
        ("spell_backwards", {}, ["no task 'spell_backwards'", "Did you mean 'spell_backward'?"]),
        (
            "spell_backward",
            {"max_word_length": 5},
            ["max_word_length", "Did you mean 'max_word_len'?", "=10"],
        ),
        ("spell_backward", {"seed": 5}, ["params.seed"]),
        (
            "spell_backward",
            {"min_word_len": 9, "max_word_len": 5},
            ["max_word_len must be >=", "min_word_len=3"],
        ),
        ("spell_backward", {"min_word_len": "three"}, ["refuses", "three"]),
        ("spell_backward", {"min_word_len": 300, "max_word_len": 400}, ["refuses"]),
        ("composite", {"datasets": [{"name": "nothing"}]}, ["refuses", "weight"]),
    ],
)
def test_mistakes_name_what_is_allowed(task: str, params: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(DataError) as error:
        ReasoningGymProblems(task, params, seed=0, size=3)
    for word in words:
        assert word in str(error.value)
