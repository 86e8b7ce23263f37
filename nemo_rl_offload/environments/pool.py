"""The same environment in several Ray actors, because some scorers are slow."""

from collections.abc import Callable, Sequence
from typing import Any

import ray

from nemo_rl_offload.config.environments import ENVIRONMENTS
from nemo_rl_offload.config.plugins import import_object
from nemo_rl_offload.config.schema import MasterConfig
from nemo_rl_offload.environments.interface import UNFINISHED, Environment, Episode, Score
from nemo_rl_offload.errors import NemoRLOffloadError, WorkerError


class EnvironmentPool:
    """Actors of one environment; a batch is cut into one contiguous piece for each."""

    def __init__(
        self, environment: Callable[..., Environment], num_workers: int, timeout_s: float | None, **arguments: object
    ) -> None:
        # No CPU is reserved: scoring runs while the policy waits, and must start where that holds all CPUs.
        actor: Any = ray.remote(num_cpus=0)(environment)
        self._name = getattr(environment, "__name__", "environment")
        self._timeout_s = timeout_s
        self._actors = [actor.remote(**arguments) for _ in range(num_workers)]

    def step(self, episodes: Sequence[Episode]) -> list[Score]:
        """As `Environment.step`, which is asked about finished responses alone.

        Raises:
            WorkerError: an actor died, took longer than ``timeout_s``, or the environment raised one.
        """
        finished = [episode for episode in episodes if episode.finished]
        scores = iter(self._ask(finished))
        return [next(scores) if episode.finished else UNFINISHED for episode in episodes]

    def _ask(self, episodes: Sequence[Episode]) -> list[Score]:
        piece_size = -(-len(episodes) // len(self._actors))
        pieces = [episodes[i * piece_size : (i + 1) * piece_size] for i in range(len(self._actors))]
        try:
            ray.get([actor.step.remote([]) for actor in self._actors])  # starting is not timed
            pending = [actor.step.remote(piece) for actor, piece in zip(self._actors, pieces, strict=True)]
            return [score for scores in ray.get(pending, timeout=self._timeout_s) for score in scores]
        except ray.exceptions.GetTimeoutError as error:
            _, late = ray.wait(pending, num_returns=len(pending), timeout=0)
            num_late = sum(len(pieces[pending.index(each)]) for each in late)
            raise WorkerError(
                f"{self._name}: {num_late} of {len(episodes)} responses were not scored within timeout_s "
                f"{self._timeout_s:g}. Raise it or num_workers, or look for an endless loop."
            ) from error
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, NemoRLOffloadError):
                failure = WorkerError(str(error.cause))
                failure.details = error.cause.details or str(error)
                raise failure from error
            raise
        except ray.exceptions.RayActorError as error:
            raise WorkerError(f"{self._name}: an environment worker died: {error}") from error

    def shutdown(self) -> None:
        """End the actors."""
        for actor in self._actors:
            ray.kill(actor)


def make_environment(config: MasterConfig) -> EnvironmentPool:
    """Start the actors of the environment that ``data.env_name`` names; Ray must be running.

    Raises:
        ConfigError: its scorer, or a function that it is told of, cannot be imported.
    """
    name = config["data"]["env_name"]
    sections: Any = config["env"]
    scorer = import_object(ENVIRONMENTS[name].scorer)
    prepare = getattr(scorer, "prepare", dict)
    return EnvironmentPool(scorer, **{"timeout_s": None, **prepare(sections[name])})
