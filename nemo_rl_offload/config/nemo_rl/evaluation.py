"""A configuration of NeMo-RL's `run_eval`, which has no policy: `eval`, `generation`, `tokenizer`, one data set, `env`.

Its keys are moved to where a recipe has them; the rest of the translation reads them there. The data set is one for
validation. What samples in validation are NeMo-RL's `val_*` keys, or those for training where it has none of these.
"""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any

from nemo_rl_offload.config.environments import ENVIRONMENTS
from nemo_rl_offload.config.nemo_rl.translation import ALL_SAMPLES, Translation
from nemo_rl_offload.config.sources import LoadedConfig, nodes
from nemo_rl_offload.specs.data_sets import DATA_SETS, HUB, OF_FILES

_SAMPLED = ("temperature", "top_p", "top_k")
_MOVES: Mapping[str, str] = {
    "generation.model_name": "policy.model_name",
    "generation.num_prompts_per_step": "grpo.val_batch_size",
    "generation": "policy.generation",
    "tokenizer": "policy.tokenizer",
    **{
        f"data.{key}": f"data.validation.{key}"
        for key in (
            "dataset_name",
            "data_path",
            "split",
            "processor",
            "repeat",
            "file_format",
            "input_key",
            "output_key",
        )
    },
    "data.problem_key": "data.validation.input_key",
    "data.solution_key": "data.validation.output_key",
}
"""Where a key, or all keys of a section, are moved to."""


def is_evaluation(loaded: LoadedConfig) -> bool:
    """Whether it is one: it says how a model generates, and has no policy."""
    return "generation" in loaded.origins and isinstance(loaded.values.get("generation"), Mapping)


def translate_evaluation(loaded: LoadedConfig) -> LoadedConfig:
    """The same as a recipe has it."""
    values: dict[str, Any] = deepcopy({key: value for key, value in loaded.values.items() if key not in _MOVES})
    given: dict[str, Any] = {}
    for path, value in _leaves(loaded.values):
        if (place := _moved(path)) != path:
            given[place] = value
            _set(values, place, value)
            if path.startswith("data."):
                values["data"].pop(path.removeprefix("data."), None)
    _set(values, "algorithm", "grpo")
    generation = values["policy"]["generation"]
    for key in _SAMPLED:
        path = f"policy.generation.{key}"
        for each in (path, f"policy.generation.val_{key}"):
            if key == "top_k" and given.get(each) == -1:
                given[each] = None
        if path in given:
            generation[f"val_{key}"] = given.get(f"policy.generation.val_{key}", given[path])
            generation[key] = given[path]
    if not generation["temperature"]:
        generation["temperature"] = 1.0  # nothing is sampled for training
    longest, precision = (given.get(f"policy.generation.vllm_cfg.{key}") for key in ("max_model_len", "precision"))
    if longest is not None:
        values["policy"]["max_total_sequence_length"] = longest
    if precision is not None:
        values["policy"]["precision"] = precision
    if "policy.tokenizer.name" not in given:
        values["policy"]["tokenizer"]["name"] = values["policy"]["model_name"]
    values["loss_fn"]["reference_policy_kl_penalty"] = 0.0
    values["grpo"]["max_val_samples"] = ALL_SAMPLES
    if values["grpo"]["val_batch_size"] == -1:
        values["grpo"]["val_batch_size"] = ALL_SAMPLES
    named = [name for name in ENVIRONMENTS if f"env.{name}" in loaded.origins]
    if named and "data.env_name" not in loaded.origins:
        values["data"]["env_name"] = named[0]
    _data_set(values["data"])
    return replace(
        loaded,
        values=values,
        origins={_moved(path): origin for path, origin in loaded.origins.items()},
        unresolved={
            _moved(path): text
            for path, text in loaded.unresolved.items()
            if path != _moved(path) or path not in (*given, "policy.tokenizer.name")
        },
        references={_moved(path): [*map(_moved, paths)] for path, paths in loaded.references.items()},
    )


def _data_set(data: dict[str, Any]) -> None:
    """A name that is none of NeMo-RL's is that of a file, a folder, or a data set of the hub."""
    validation = data["validation"]
    name = validation.get("dataset_name")
    if isinstance(name, str) and name not in (*DATA_SETS, *OF_FILES) and "/" in name and "://" not in name:
        is_file = name.startswith(("/", ".", "~")) or "." in name.rpartition("/")[2] or name.count("/") > 1
        validation["path"] = name if is_file else f"{HUB}{name}"
        del validation["dataset_name"]
    validation.pop("file_format", None)  # a file's name says it


def train_on_the_same(translation: Translation) -> None:
    """Name for training, which there is not, what is evaluated: a configuration of GRPO has both."""
    for key in ("path", "split", "input_key", "output_key"):
        translation.set(f"data.train.{key}", translation.get(f"data.validation.{key}"))


def _moved(path: str) -> str:
    section = path
    while section not in _MOVES:
        section, dot, _ = section.rpartition(".")
        if not dot:
            break
    target = _MOVES.get(section)
    return path if target is None else f"{target}{path[len(section) :]}"


def _leaves(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for path, value in nodes(values):
        if not (isinstance(value, Mapping) and value):
            yield path, value


def _set(values: dict[str, Any], path: str, value: Any) -> None:
    *parents, key = path.split(".")
    for part in parents:
        values = values.setdefault(part, {})
    values[key] = value
