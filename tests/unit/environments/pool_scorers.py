"""Environments that do not keep to `Environment`, or cannot be made."""

import os
import sys
from collections.abc import Sequence

from nemo_rl_offload.environments.interface import Episode, Score
from nemo_rl_offload.errors import ConfigError, WorkerError


class Refuses:
    def __init__(self) -> None:
        raise ConfigError("task: no such task")


class RaisesAtStart:
    def __init__(self) -> None:
        raise KeyError("nothing")


class ExitsAtStart:
    def __init__(self) -> None:
        sys.exit(5)


class DiesAtStart:
    def __init__(self) -> None:
        os._exit(7)


class TwoScores:
    def step(self, episodes: Sequence[Episode]) -> list[Score]:
        return [Score(1.0, True, False)] * 2


class NotFinite:
    def step(self, episodes: Sequence[Episode]) -> list[Score]:
        return [Score(float("nan"), True, False)]


class NoText:
    def step(self, episodes: Sequence[Episode]) -> list[Score]:
        return [Score(0.0, False, False, b"bytes")]  # type: ignore[arg-type]


class GivesUp:
    def step(self, episodes: Sequence[Episode]) -> list[Score]:
        raise WorkerError("the judge has moved")
