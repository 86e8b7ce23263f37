"""Rewards for mathematical answers, compared by value (`math-verify`) or by text.

`math-verify` finds an answer in a response (``\\boxed{}``, ``$...$``, a number or expression in plain text), turns it
into a sympy object and compares that with the reference answer. It stops itself after a few seconds by an alarm signal,
which reaches a process's main thread only: there Ray runs an actor's methods.
"""

import re
from collections.abc import Sequence
from typing import Literal

from math_verify import parse, verify

from nemo_rl_offload.environments.interface import Episode, Score


class MathEnvironment:
    """Reward 1 for a right answer, 0 for a wrong one; the arguments are those of the section ``env.math``."""

    def __init__(self, comparison: Literal["symbolic", "exact"]) -> None:
        self._is_right = _is_same_value if comparison == "symbolic" else _is_same_text

    def step(self, episodes: Sequence[Episode]) -> list[Score]:
        """Compare each answer with the record's; every episode has one turn."""
        return [self._score(episode.entry["answer"], episode.messages[-1]["content"]) for episode in episodes]

    def _score(self, answer: object, response: str) -> Score:
        assert isinstance(answer, str), "read so from the data"
        try:
            is_right = self._is_right(answer, response)
        except Exception:  # noqa: BLE001 - what a model wrote can be anything; counted
            return Score(0.0, is_correct=False, scorer_error=True)
        return Score(float(is_right), is_right, scorer_error=False)


def _is_same_value(answer: str, response: str) -> bool:
    reference: list[object] = parse(f"${_final(answer)}$", raise_on_error=True)
    return bool(verify(reference, parse(response, raise_on_error=True), raise_on_error=True))


def _is_same_text(answer: str, response: str) -> bool:
    return _final(answer) == _final(response)


def _final(text: str) -> str:
    """The last ``\\boxed{...}``, or what follows a last ``####`` (as in GSM8K), or all; without outer spaces and $."""
    start = text.rfind(r"\boxed{")
    if start >= 0:
        begin = start + len(r"\boxed{")
        return text[begin : _closing(text, begin)].strip(" $\n")
    return re.split("####", text)[-1].strip(" $\n")


def _closing(text: str, begin: int) -> int:
    depth = 1
    for place in range(begin, len(text)):
        depth += (text[place] == "{") - (text[place] == "}")
        if depth == 0:
            return place
    return len(text)
