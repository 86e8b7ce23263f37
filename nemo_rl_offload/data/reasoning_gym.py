"""Problems of reasoning-gym: generated on demand, the same for the same task, parameters, seed and index."""

import dataclasses
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from nemo_rl_offload.errors import DataError, nearest


@dataclasses.dataclass(frozen=True)
class Problem:
    """One question; ``answer`` is None where a task accepts many, ``entry`` is what its scorer needs."""

    question: str
    answer: str | None
    entry: dict[str, object]


class ReasoningGymProblems:
    """``size`` problems of a task, generated when indexed, because some tasks take seconds for one problem.

    Index ``i`` of most tasks depends on ``seed + i``: sets whose seeds are less than ``size`` apart overlap.

    Raises:
        DataError: the task is unknown, or it refuses the parameters.
    """

    def __init__(self, task: str, params: Mapping[str, object], seed: int, size: int) -> None:
        self._dataset = create_dataset(task, params, seed, size)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Problem:
        if not 0 <= index < len(self):
            raise IndexError(index)
        entry = self._dataset[index]
        return Problem(entry["question"], entry["answer"], entry)

    def __iter__(self) -> Iterator[Problem]:
        return (self[index] for index in range(len(self)))


def create_dataset(task: str, params: Mapping[str, object], seed: int, size: int) -> Any:
    """Return reasoning-gym's dataset object; the errors of ``ReasoningGymProblems``.

    The library is imported here: it takes seconds, and a run on files does without.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # of cellpylib, at its first compilation
        import reasoning_gym
        from reasoning_gym.composite import DatasetSpec
        from reasoning_gym.factory import DATASETS
    if task not in DATASETS:
        raise DataError(
            f"env.reasoning_gym.task: reasoning-gym has no task '{task}'.{nearest(task, DATASETS)} "
            f"It has: {', '.join(sorted(DATASETS))}."
        )
    fields = {f.name: f for f in dataclasses.fields(DATASETS[task][1]) if f.name not in ("seed", "size")}
    unknown = [name for name in params if name not in fields]
    if unknown:
        raise DataError(
            "\n".join(
                f"env.reasoning_gym.params.{name}: not a parameter of task '{task}'.{nearest(name, fields)} "
                f"Remove it: ~env.reasoning_gym.params.{name}"
                for name in unknown
            )
            + f"\nThe task has: {_describe(fields)}."
        )
    values: dict[str, Any] = dict(params)
    try:
        if task == "composite":
            values["datasets"] = [DatasetSpec(**spec) for spec in values.get("datasets", ())]
        dataset = reasoning_gym.create_dataset(task, seed=seed, size=size, **values)
        dataset[0]  # some values are only used, and refused, here
    except Exception as error:
        raise DataError(
            f"env.reasoning_gym.params: task '{task}' refuses {dict(params)}: "
            f"{str(error) or type(error).__name__}. "
            f"Its parameters and their defaults: {_describe(fields)}."
        ) from error
    return dataset


def _describe(fields: Mapping[str, dataclasses.Field[object]]) -> str:
    def default(field: dataclasses.Field[object]) -> object:
        if field.default_factory is not dataclasses.MISSING:
            return field.default_factory()
        return field.default

    return ", ".join(f"{name}={default(field)!r}" for name, field in fields.items()) or "none"
