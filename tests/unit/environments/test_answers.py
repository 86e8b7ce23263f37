"""Answers behind "Answer:": DAPO's rule, and letters of multiple choice."""

import pytest

from nemo_rl_offload.environments.interface import Episode
from nemo_rl_offload.environments.mathematics import MathEnvironment


def is_right(comparison: str, answer: str, response: str) -> bool:
    episode = Episode({"answer": answer}, [{"role": "assistant", "content": response}])
    (score,) = MathEnvironment(comparison, None).step([episode])
    assert score.reward == float(score.is_correct)
    return score.is_correct


@pytest.mark.parametrize(
    ("answer", "response", "wanted"),
    [
        ("34", "So it is so.\nAnswer: 34", True),
        ("34", "answer :34", True),
        ("34", "Answer: $34$", True),
        ("34", r"Answer: \boxed{34}", True),
        ("34", "Answer: $x=34$", True),
        ("34", "Answer: 34 dollars", True),
        ("34", r"Answer: 34^\circ", True),
        ("34", r"Answer: 34 \text{ cm}", True),
        ("1234", "Answer: 1,234", True),
        ("-7", "Answer: -7", True),
        (r"\frac{1}{2}", r"Answer: \frac12", True),
        (r"\sqrt{3}", r"Answer: $\sqrt3$", True),
        ("0.5", r"Answer: \frac12", False),  # not by value
        ("34", "Answer: 35\nAnswer: 34", True),
        ("34", "Answer: 34\nAnswer: 35", False),
        ("34", r"\boxed{34}", False),  # no such word
        ("34", "34", False),
        ("34", "Answer: 34" + " and on" * 50, False),  # 300 characters count
        ("34", "", False),
        ("Answer", "Answer:", False),
    ],
)
def test_dapo(answer: str, response: str, wanted: bool) -> None:
    assert is_right("dapo", answer, response) is wanted


@pytest.mark.parametrize(
    ("answer", "response", "english", "multilingual"),
    [
        ("B", "Answer: B", True, True),
        ("B", "**Answer: B**", True, True),
        ("B", r"Answer: $\boxed{B}$", True, True),
        ("B", r"Answer: \text{B}", True, True),
        ("B", "Answer: C", False, False),
        ("B", "Answer: C, no. Answer: B", False, False),  # the first counts
        ("B", "Answer: b", False, False),
        ("J", "Answer: J", True, False),  # four letters there
        ("B", "答案\uff1aB", False, True),
        ("B", "答え: \uff22", False, True),
        ("B", "الإجابة الصحيحة: ب", False, True),
        ("C", "উত্তর: ড", False, True),
        ("D", "Respuesta : D", False, True),
        ("B", "It is B.", False, False),
        ("B", "", False, False),
    ],
)
def test_letters(answer: str, response: str, english: bool, multilingual: bool) -> None:
    assert is_right("english_multichoice", answer, response) is english
    assert is_right("multilingual_multichoice", answer, response) is multilingual
