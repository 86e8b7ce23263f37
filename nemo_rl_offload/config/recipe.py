"""A configuration as a run takes it: with the defaults for what its files leave out, in this project's keys.

`loader` merges files and overrides as they are written. Here every key that is missing then has the default of
`base.yaml`, whatever the files inherit; and what is written in NeMo-RL's language is translated.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from nemo_rl_offload.config.algorithms import ALGORITHMS
from nemo_rl_offload.config.full_schema import full_schema
from nemo_rl_offload.config.loader import read_config
from nemo_rl_offload.config.nemo_rl.data_sections import (
    add_data_set,
    further_data_sets,
    translate_data,
    translate_lists,
)
from nemo_rl_offload.config.nemo_rl.dtensor import is_override, trains_with_dtensor, translate_dtensor
from nemo_rl_offload.config.nemo_rl.evaluation import (
    NOT_TO_TRAIN,
    is_evaluation,
    train_on_the_same,
    translate_evaluation,
)
from nemo_rl_offload.config.nemo_rl.grpo import GRPO_STEPS
from nemo_rl_offload.config.nemo_rl.gym import GYM_STEPS, gather_gym
from nemo_rl_offload.config.nemo_rl.translation import STEPS, Translation, is_known, read_section
from nemo_rl_offload.config.schema import MegatronConfig
from nemo_rl_offload.config.sources import LoadedConfig
from nemo_rl_offload.config.types import defaults_of


def read_recipe(path: str | Path, overrides: Sequence[str] = (), algorithm: str | None = None) -> LoadedConfig:
    """Return the configuration of a file, whole and translated.

    The algorithm is that of the key `algorithm`, else the one whose section the files have, else ``algorithm``, the
    command's. Raises ConfigError as `read_config` does.
    """
    return translated(read_config(path, overrides, whole=True), algorithm)


def translated(loaded: LoadedConfig, algorithm: str | None) -> LoadedConfig:
    """What files and overrides say, and defaults, in this project's keys; ``algorithm`` is the command's."""
    return _with_notes(*_translation(loaded, algorithm))


def _translation(loaded: LoadedConfig, algorithm: str | None) -> tuple[LoadedConfig, Translation]:
    """With what was loaded as a recipe has it."""
    if evaluates := is_evaluation(loaded):
        loaded = translate_evaluation(loaded)
    values = loaded.values
    problems: dict[str, str] = {"generation": NOT_TO_TRAIN} if evaluates and algorithm is not None else {}
    if "algorithm" not in loaded.origins:
        values = {**values, "algorithm": _algorithm_of(loaded, algorithm, problems)}
    written, values = values, gather_gym(translate_lists(values, problems))
    translation = Translation({}, loaded.origins, problems)
    translation.without_effect |= dict.fromkeys(variables := _variables(loaded), "a value that others refer to")
    values = {key: value for key, value in values.items() if key not in variables}
    translation.values = read_section(translation, values, "", full_schema())
    if isinstance(values["algorithm"], str) and values["algorithm"] in ALGORITHMS:
        by_dtensor = trains_with_dtensor(translation)
        if by_dtensor:
            steps = translation.get(f"{values['algorithm']}.max_num_steps")
            translate_dtensor(
                translation, defaults_of(MegatronConfig), loaded.origins, steps if isinstance(steps, int) else None
            )
            for key in [each for each in translation.honoured if each.startswith("policy.megatron_cfg.")]:
                if not is_override(loaded.origin(key)):
                    del translation.honoured[key]
                    translation.without_effect[key] = "policy.dtensor_cfg says how the recipe is trained"
        else:
            for key in ("policy.optimizer", "policy.scheduler", "policy.max_grad_norm"):
                if translation.honoured.get(key) is not None:
                    translation.without_effect[key] = "policy.megatron_cfg says it where Megatron-Core trains"
            for key in translation.honoured:
                if key.startswith("policy.dtensor_cfg."):
                    translation.without_effect[key] = "policy.dtensor_cfg.enabled is not true"
        translate_data(translation, partial(_rank, loaded))
        for split, place, other in further_data_sets(written):
            origins = {path: at for path, at in loaded.origins.items() if not path.startswith(f"data.{split}.")}
            _, inner = _translation(replace(loaded, values=other, origins=origins), algorithm)
            add_data_set(translation, split, place, inner)
        if evaluates:
            train_on_the_same(translation)
        for step in (*GRPO_STEPS, *GYM_STEPS, *STEPS):
            step(translation)
    return loaded, translation


def _rank(loaded: LoadedConfig, path: str) -> int:
    """How near a key is given: inherited, in the file itself, or on the command line."""
    return 2 if is_override(loaded.origin(path)) else int(path not in loaded.inherited)


def _variables(loaded: LoadedConfig) -> set[str]:
    """Keys beside the sections that nothing knows, and that other values are made of."""
    referred = {path.partition(".")[0] for paths in loaded.references.values() for path in paths}
    return {key for key in loaded.values if key in referred and not is_known(key)}


def _algorithm_of(loaded: LoadedConfig, algorithm: str | None, problems: dict[str, str]) -> Any:
    named = [name for name in ALGORITHMS if name in loaded.origins]
    if algorithm in named or not named:
        return algorithm or next(iter(ALGORITHMS))
    if len(named) > 1:
        problems["algorithm"] = f"missing value: there are sections for {' and '.join(named)}. Give algorithm=NAME."
    return named[0]


def _with_notes(loaded: LoadedConfig, translation: Translation) -> LoadedConfig:
    origins = dict(loaded.origins)
    for path, source in translation.became.items():
        if (origin := loaded.origin(source)) and path != source:
            origins[path] = f"{origin}, {source}"
    return replace(
        loaded,
        values=translation.values,
        origins=origins,
        refused=translation.problems,
        without_effect=translation.without_effect,
        notes=translation.warnings,
        is_recipe=translation.is_recipe,
    )
