"""A configuration of NeMo-RL's `run_eval`, which has no policy: `eval`, `generation`, `tokenizer`, one data set, `env`.

Its keys are moved to where a recipe has them; the rest of the translation reads them there. The data set is one for
validation. What samples in validation are NeMo-RL's `val_*` keys, or those for training where it has none of these.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from nemo_rl_offload.config.environments import ENVIRONMENTS
from nemo_rl_offload.config.nemo_rl.translation import ALL_SAMPLES, Translation
from nemo_rl_offload.config.sources import OVERRIDE, LoadedConfig
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
    """Whether it is one: it says how a model generates, and its files have no policy."""
    has_policy = loaded.origins.get("policy", OVERRIDE) != OVERRIDE
    return "generation" in loaded.origins and isinstance(loaded.values.get("generation"), Mapping) and not has_policy


def translate_evaluation(loaded: LoadedConfig) -> LoadedConfig:
    """The same as a recipe has it."""
    moved = Translation({key: value for key, value in loaded.values.items() if key not in _MOVES}, loaded.origins)
    given: dict[str, Any] = {}
    for path, value in _leaves(loaded.values):
        if (place := _moved(path)) != path and (value not in ({}, None) or not isinstance(moved.get(place), Mapping)):
            given[place] = value
            moved.set(place, value)
    if isinstance(data := moved.get("data"), Mapping):
        moved.set("data", {key: value for key, value in data.items() if f"data.{key}" not in _MOVES})
    moved.set("algorithm", "grpo")
    for key in _SAMPLED:
        path = f"policy.generation.{key}"
        for each in (path, f"policy.generation.val_{key}"):
            if key == "top_k" and given.get(each) == -1:
                given[each] = None
        if path in given:
            moved.set(f"policy.generation.val_{key}", given.get(f"policy.generation.val_{key}", given[path]))
            moved.set(path, given[path])
    if not moved.get("policy.generation.temperature"):
        moved.set("policy.generation.temperature", 1.0)  # nothing is sampled for training
    longest, precision = (given.get(f"policy.generation.vllm_cfg.{key}") for key in ("max_model_len", "precision"))
    if longest is not None:
        moved.set("policy.max_total_sequence_length", longest)
        for path, written in (
            ("data.max_input_seq_length", "data.max_input_seq_length"),
            ("policy.generation.max_new_tokens", "generation.max_new_tokens"),
        ):
            if written not in loaded.origins:
                moved.set(path, longest)
    if precision == "fp8":
        moved.set("policy.generation.vllm_cfg.precision", precision)
    elif precision is not None:
        moved.set("policy.precision", precision)
    if "policy.tokenizer.name" not in given:
        moved.set("policy.tokenizer.name", moved.get("policy.model_name"))
    moved.set("loss_fn.reference_policy_kl_penalty", 0.0)
    moved.set("grpo.max_val_samples", ALL_SAMPLES)
    if moved.get("grpo.val_batch_size") == -1:
        moved.set("grpo.val_batch_size", ALL_SAMPLES)
    named = [name for name in ENVIRONMENTS if f"env.{name}" in loaded.origins]
    if named and "data.env_name" not in loaded.origins:
        moved.set("data.env_name", named[0])
    if isinstance(validation := moved.get("data.validation"), Mapping):
        moved.set("data.validation", _data_set(validation))
    return replace(
        loaded,
        values=moved.values,
        origins={_moved(path): origin for path, origin in loaded.origins.items()},
        unresolved={
            _moved(path): text
            for path, text in loaded.unresolved.items()
            if path != _moved(path) or path not in (*given, "policy.tokenizer.name")
        },
        references={_moved(path): [*map(_moved, paths)] for path, paths in loaded.references.items()},
        is_evaluation=True,
    )


def _data_set(validation: Mapping[str, Any]) -> dict[str, Any]:
    """A name that is none of NeMo-RL's is that of a file, a folder, or a data set of the hub."""
    found = {key: value for key, value in validation.items() if key != "file_format"}  # a file's name says it
    name = found.get("dataset_name")
    if isinstance(name, str) and name not in (*DATA_SETS, *OF_FILES) and "/" in name and "://" not in name:
        is_file = name.startswith(("/", ".", "~")) or "." in name.rpartition("/")[2] or name.count("/") > 1
        found["path"] = name if is_file else f"{HUB}{name}"
        del found["dataset_name"]
    return found


NOT_TO_TRAIN = (
    "is how NeMo-RL's run_eval says it, and a file without policy is no configuration of training. Evaluate it by "
    "`nemo-rl-offload eval --config FILE`, or write policy.generation."
)
"""What is wrong with such a file in `run`."""


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


def _leaves(values: Mapping[str, Any], section: str = "") -> Iterator[tuple[str, Any]]:
    """Values that are no sections, lists as a whole; and empty sections."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{section}{key}.")
        else:
            yield f"{section}{key}", value
