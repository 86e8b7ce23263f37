"""Rewards from reasoning-gym's own scorers, some of which fail on what a model wrote: the response then counts 0."""

import math
from collections.abc import Mapping, Sequence

from nemo_rl_offload.data.reasoning_gym import create_dataset
from nemo_rl_offload.environments.interface import Episode, Score


class ReasoningGymEnvironment:
    """Scores answers; the arguments are those of the section ``env.reasoning_gym``."""

    def __init__(self, task: str, params: Mapping[str, object], binary_reward: bool, correct_threshold: float) -> None:
        self._dataset = create_dataset(task, params, seed=0, size=1)
        self._binary_reward = binary_reward
        self._correct_threshold = correct_threshold

    def step(self, episodes: Sequence[Episode]) -> list[Score]:
        """Score each answer; every episode has one turn."""
        return [self._score(episode.entry, episode.messages[-1]["content"]) for episode in episodes]

    def _score(self, entry: Mapping[str, object], response: str) -> Score:
        score = float(self._dataset.score_answer(answer=response, entry=entry))
        if not math.isfinite(score):
            raise ValueError(f"reasoning-gym's score is {score}")
        is_correct = score >= self._correct_threshold
        return Score(float(is_correct) if self._binary_reward else score, is_correct, scorer_error=False)
