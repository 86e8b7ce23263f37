"""Mathematical answers, by value and by text."""

from collections.abc import Sequence
from typing import Any

import pytest
from patience import within_patience

from nemo_rl_offload.environments.interface import Episode, Score
from nemo_rl_offload.environments.mathematics import MathEnvironment
from nemo_rl_offload.environments.thinking import without_thinking

TAGS = ("<think>", "</think>")


def is_right(comparison: Any, answer: str, response: str, tags: Sequence[str] | None = TAGS) -> bool:
    episode = Episode({"answer": answer}, [{"role": "assistant", "content": response}])
    (score,) = MathEnvironment(comparison, tags).step([episode])
    assert score == Score(float(score.is_correct), score.is_correct, scorer_error=False, answer=score.answer)
    return score.is_correct


@pytest.mark.parametrize(
    ("answer", "response", "by_value", "by_text"),
    [
        ("72", "That makes 72.", True, False),
        ("72", r"So it is $\boxed{72}$.", True, True),
        ("72", "#### 72", True, True),
        ("First 70, then 2.\n#### 72", r"\boxed{72}", True, True),
        ("72", r"\boxed{73}", False, False),
        ("72", "I do not know", False, False),
        (r"\frac{1}{2}", r"\boxed{0.5}", True, False),
        (r"\frac{1}{2}", r"\boxed{\frac{1}{2}}", True, True),
        ("2x+1", r"\boxed{1+2x}", True, False),
        (r"\boxed{x^2-1}", r"$(x-1)(x+1)$", True, False),
        (r"\sqrt{8}", r"$2\sqrt{2}$", True, False),
        (r"\{1,2\}", r"\boxed{\{2,1\}}", True, False),
        ("72", r"\boxed{72", True, True),
    ],
)
def test_answers(answer: str, response: str, by_value: bool, by_text: bool) -> None:
    assert is_right("symbolic", answer, response) == by_value
    assert is_right("exact", answer, response) == by_text


@pytest.mark.parametrize(
    ("response", "by_value", "by_text"),
    [
        (r"\boxed{1}, no: \boxed{2}", True, True),
        (r"$\boxed{1}$ and $\boxed{2}$", True, True),
        (r"\boxed{2}, no: \boxed{1}", False, False),
        (r"\boxed{2} and the answer is 1, or $1$", True, True),
        (r"\boxed{\boxed{2}}", True, True),
        (r"\boxed {2}", True, True),
        (r"\fbox{2}", True, True),
        (r"\boxed{1} \boxed{2", True, True),
        (r"\boxed{1} \boxed{", False, False),
        (r"<think>\boxed{1}</think> So \boxed{2}", True, True),
        (r"<think>\boxed{2}</think> So \boxed{1}", False, False),
        (r"\boxed{2} <think>no, \boxed{1}</think>", True, True),
        (r"\boxed{1} was thought before </think> So \boxed{2}", True, True),
        (r"\boxed{2} was thought before </think>", False, False),
        (r"\boxed{2} <think>is it \boxed{1}", True, True),
        (r"<think>it is \boxed{2}", False, False),
        (r"<think>a</think> \boxed{1} <think>b</think> \boxed{2} <think>c</think>", True, True),
        ("<think>2</think>", False, False),
        ("", False, False),
    ],
)
def test_the_last_box_outside_of_thinking_counts(response: str, by_value: bool, by_text: bool) -> None:
    assert is_right("symbolic", "2", response) == by_value
    assert is_right("exact", "2", response) == by_text


@pytest.mark.parametrize("comparison", ["symbolic", "exact"])
def test_what_thinking_is_can_be_said(comparison: Any) -> None:
    response = r"[THINK]\boxed{1}[/THINK]\boxed{2}<think>\boxed{3}"
    assert is_right(comparison, "2", rf"{response}</think>")
    assert is_right(comparison, "3", response, ["[THINK]", "[/THINK]"])
    assert is_right(comparison, "1", r"\boxed{2}[THINK]\boxed{1}[/THINK]", None)
    assert is_right(comparison, "2", r"\boxed{2}[THINK]\boxed{1}[/THINK]", ["[THINK]", "[/THINK]"])


def test_thinking_is_found_in_no_time() -> None:
    with within_patience():
        assert without_thinking("<think>" * 1_000_000, "<think>", "</think>") == ""
        assert without_thinking("</think>" * 1_000_000 + "2", "<think>", "</think>") == "2"


@pytest.mark.parametrize(
    ("comparison", "response", "found"),
    [
        ("symbolic", r"\boxed{\frac{1}{2}}", "1/2"),
        ("symbolic", "That makes 72.", "72"),
        ("symbolic", "I do not know", None),
        ("exact", r"So $\boxed{x}$.", "x"),
        ("dapo", "Answer: $\\frac12$", "\\frac{1}{2}"),
        ("dapo", "It is 3", None),
        ("english_multichoice", "Answer: C, surely", "C"),
        ("english_multichoice", "C", None),
        ("multilingual_multichoice", "答案:B", "B"),
        ("multilingual_multichoice", "B", None),
    ],
)
def test_what_responses_vote_by(comparison: str, response: str, found: str | None) -> None:
    episode = Episode({"answer": "1"}, [{"role": "assistant", "content": response}])
    (score,) = MathEnvironment(comparison, None).step([episode])
    assert score.answer == found
