"""Rewards from reasoning-gym's own scorers, computed by a few Ray actors because some scorers are slow."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import ray

from nemo_rl_offload.config.schema import ReasoningGymConfig
from nemo_rl_offload.data.reasoning_gym import create_dataset
from nemo_rl_offload.errors import WorkerError


class Score(NamedTuple):
    """``scorer_error``: the task's own scorer failed on the response, which then counts as wrong."""

    reward: float
    is_correct: bool
    scorer_error: bool


class ReasoningGymEnvironment:
    """Scores responses; the arguments are those of the section ``env.reasoning_gym``."""

    def __init__(self, task: str, params: Mapping[str, Any], binary_reward: bool, correct_threshold: float) -> None:
        self._dataset = create_dataset(task, params, seed=0, size=1)
        self._binary_reward = binary_reward
        self._correct_threshold = correct_threshold

    def score(
        self, entries: Sequence[dict[str, Any]], responses: Sequence[str], finished: Sequence[bool]
    ) -> list[Score]:
        """Score each response to its entry; one that is not ``finished`` (no end token) has reward 0."""
        return [self._score(*item) for item in zip(entries, responses, finished, strict=True)]

    def _score(self, entry: dict[str, Any], response: str, finished: bool) -> Score:
        if not finished:
            return Score(0.0, is_correct=False, scorer_error=False)
        try:
            score = float(self._dataset.score_answer(answer=response, entry=entry))
        except Exception:  # noqa: BLE001 - scorers parse what a model wrote, and some fail on it; counted
            return Score(0.0, is_correct=False, scorer_error=True)
        is_correct = score >= self._correct_threshold
        return Score(float(is_correct) if self._binary_reward else score, is_correct, scorer_error=False)


class EnvironmentPool:
    """The same environment in several actors; a batch is cut into one contiguous piece for each."""

    def __init__(self, num_workers: int, **arguments: Any) -> None:
        # No CPU is reserved: scoring runs while the policy waits, and must start where that holds all CPUs.
        actor: Any = ray.remote(num_cpus=0)(ReasoningGymEnvironment)
        self._actors = [actor.remote(**arguments) for _ in range(num_workers)]

    def score(
        self, entries: Sequence[dict[str, Any]], responses: Sequence[str], finished: Sequence[bool]
    ) -> list[Score]:
        """As ``ReasoningGymEnvironment.score``.

        Raises:
            WorkerError: an actor died.
        """
        piece_size = -(-len(entries) // len(self._actors))
        pieces = [slice(i * piece_size, (i + 1) * piece_size) for i in range(len(self._actors))]
        pending = [
            actor.score.remote(entries[piece], responses[piece], finished[piece])
            for actor, piece in zip(self._actors, pieces, strict=True)
        ]
        try:
            return [score for scores in ray.get(pending) for score in scores]
        except ray.exceptions.RayActorError as error:
            raise WorkerError(f"A reasoning-gym environment worker died: {error}") from error

    def shutdown(self) -> None:
        """End the actors."""
        for actor in self._actors:
            ray.kill(actor)


def make_environment(config: ReasoningGymConfig) -> EnvironmentPool:
    """Start ``num_workers`` actors for the section ``env.reasoning_gym``; Ray must be running."""
    return EnvironmentPool(**config)
