"""Rewards for mathematical answers, compared by value (`math-verify`), by text, or as a benchmark does (`answers.py`).

The last box counts, `\\boxed{...}`, wherever it stands but in thinking. In a response without one, `math-verify` looks
for an answer itself: `$...$`, "the answer is ...", a number or expression in plain text. It turns answer and reference
into sympy objects and compares these. Its own limit of time is an exception that ends programs (`BaseException`), and
leaves much that cannot be interrupted; here the process has limits instead (`process.py`).
"""

import logging
import re
from collections.abc import Callable, Mapping, Sequence

from math_verify import parse, verify

from nemo_rl_offload.environments.answers import Compared, is_dapo_answer, is_english_choice, is_multilingual_choice
from nemo_rl_offload.environments.interface import Episode, Score
from nemo_rl_offload.environments.thinking import without_thinking

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that it has no limit of time


class MathEnvironment:
    """Reward 1 for a right answer, 0 for a wrong one; the arguments are those of the section `env.math`."""

    def __init__(self, comparison: str, thinking_tags: Sequence[str] | None) -> None:
        self._compare = _COMPARISONS[comparison]
        self._thinking_tags = thinking_tags

    def step(self, episodes: Sequence[Episode]) -> list[Score]:
        """Compare each answer with the record's; every episode has one turn."""
        return [self._score(episode.entry["answer"], episode.messages[-1]["content"]) for episode in episodes]

    def _score(self, answer: object, response: str) -> Score:
        assert isinstance(answer, str), "read so from the data"
        if self._thinking_tags is not None:
            response = without_thinking(response, *self._thinking_tags)
        is_right, found = self._compare(answer, response)
        return Score(float(is_right), is_right, scorer_error=False, answer=found)


def _is_same_value(answer: str, response: str) -> Compared:
    box = _last_box(response)
    found = _parse(response if box is None else f"${box}$")
    is_right = bool(verify(_parse(f"${_final(answer)}$"), found, raise_on_error=True, timeout_seconds=None))
    return is_right, str(found[0]) if found else None


def _parse(text: str) -> list[object]:
    parsed: list[object] = parse(text, raise_on_error=True, parsing_timeout=None)
    return parsed


def _is_same_text(answer: str, response: str) -> Compared:
    return _final(answer) == (found := _final(response)), found


def _final(text: str) -> str:
    """The last box, or what follows a last `####` (as in GSM8K), or all; without outer spaces and $."""
    box = _last_box(text)
    return text.split("####")[-1].strip(" $\n") if box is None else box


def _last_box(text: str) -> str | None:
    """What the last box holds, to the end of the text where nothing closes it; without outer spaces and $."""
    begins = [match.end() for match in re.finditer(r"\\(?:boxed|fbox)\s*\{", text)]
    if not begins:
        return None
    depth = 1
    for match in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, begins[-1]):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return text[begins[-1] : match.start()].strip(" $\n")
    return text[begins[-1] :].strip(" $\n")


_COMPARISONS: Mapping[str, Callable[[str, str], Compared]] = {
    "symbolic": _is_same_value,
    "exact": _is_same_text,
    "dapo": is_dapo_answer,
    "english_multichoice": is_english_choice,
    "multilingual_multichoice": is_multilingual_choice,
}
