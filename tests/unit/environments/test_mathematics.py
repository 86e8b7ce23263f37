"""Mathematical answers, by value and by text."""

from typing import Any

import pytest

from nemo_rl_offload.environments.interface import Episode, Score
from nemo_rl_offload.environments.mathematics import MathEnvironment


def is_right(comparison: Any, answer: str, response: str) -> bool:
    episode = Episode({"answer": answer}, [{"role": "assistant", "content": response}])
    (score,) = MathEnvironment(comparison).step([episode])
    assert score == Score(float(score.is_correct), score.is_correct, scorer_error=False)
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
        ("72", r"\boxed{72", False, True),
    ],
)
def test_answers(answer: str, response: str, by_value: bool, by_text: bool) -> None:
    assert is_right("symbolic", answer, response) == by_value
    assert is_right("exact", answer, response) == by_text


def test_what_cannot_be_compared_is_counted() -> None:
    episode = Episode({"answer": "5"}, [{"role": "assistant", "content": r"\boxed{5}"}])
    environment = MathEnvironment("symbolic")
    environment._is_right = lambda answer, response: 1 / 0 > 0
    assert environment.step([episode]) == [Score(0.0, is_correct=False, scorer_error=True)]
