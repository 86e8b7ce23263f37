"""Several rewards for an answer that a response gives between tags, as GDPO's example compares them.

They are NeMo-RL's: whether what stands behind the last `<answer>` is the record's answer as text, whether it is a whole
number, and whether the response is thinking and one answer between tags, and nothing else.
"""

import re
from collections.abc import Sequence

from nemo_rl_offload.environments.interface import Episode, Score

_FORM = re.compile(r"^<think>.*?</think>\n<answer>.*?</answer>$", re.DOTALL)


class MathMultiReward:
    """Rewards `correctness`, `format` and `integer`, each 0 or 1."""

    def step(self, episodes: Sequence[Episode]) -> list[Score]:
        """Score each answer; every episode has one turn."""
        return [self._score(episode.entry["answer"], episode.messages[-1]["content"]) for episode in episodes]

    def _score(self, answer: object, response: str) -> Score:
        given = response.split("<answer>")[-1].split("</answer>")[0].strip()
        has_one = response.count("<answer>") == response.count("</answer>") == 1
        parts = {
            "correctness": float(given == answer),
            "format": float(has_one and _FORM.search(response) is not None),
            "integer": float(given.isdigit()),
        }
        return Score(sum(parts.values()), given == answer, scorer_error=False, parts=parts, answer=given)
