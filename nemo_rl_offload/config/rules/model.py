"""Rules about the model that a `config.json` describes: what of it is honoured (`specs/model_families.py`)."""

import json
from collections.abc import Iterator, Mapping

from nemo_rl_offload.config.rules.rule import (
    MEGATRON,
    Get,
    algorithm_spec,
    megatron,
    read_model_config,
    with_overrides_of_run,
)
from nemo_rl_offload.errors import ConfigError, nearest
from nemo_rl_offload.specs.catalogue import other_family
from nemo_rl_offload.specs.model_families import (
    SPLIT_PACKS,
    TORCH_LAYERS,
    needs_torch_layers,
    refusals,
    unknown_keys,
    windows_or_sinks,
)
from nemo_rl_offload.specs.model_keys import POSITION_KEYS, ROPE_KEYS, Content, is_number

OVERRIDES = "policy.hf_config_overrides"


def model_is_honoured(get: Get) -> Iterator[str]:
    """A rule: nothing in the `config.json` of the model, or of the teacher, is left out."""
    for path, content, before in _models_and_folders(get):
        longest = get("policy.max_total_sequence_length")
        of_folder = refusals(before, longest)
        for refusal in refusals(content, longest):
            yield f"{path if refusal in of_folder else OVERRIDES}: {refusal}"
        key = needs_torch_layers(content)
        if key is not None and megatron(get, "transformer_impl") == "transformer_engine":
            yield f"{path}: {TORCH_LAYERS.format(key=key)}"


def packs_are_split(get: Get) -> Iterator[str]:
    """A rule: attention is there for packs whose sequences context-parallel ranks share."""
    num_ranks = megatron(get, "context_parallel_size")
    if num_ranks == 1 or not get("policy.sequence_packing.enabled"):
        return
    for path, content in _models(get):
        if (what := windows_or_sinks(content)) and megatron(get, "transformer_impl") == "transformer_engine":
            yield f"{MEGATRON}.context_parallel_size: {SPLIT_PACKS.format(num_ranks=num_ranks, what=what, path=path)}"


def model_keys_without_effect(get: Get) -> Iterator[str]:
    """A warning with the keys of `config.json` that transformers does not read."""
    for path, content in _models(get):
        if unknown := unknown_keys(content):
            keys = ", ".join(unknown)
            yield f"{path}: of no effect in config.json, since transformers does not read it for this family: {keys}."


def _models(get: Get) -> Iterator[tuple[str, Content]]:
    for path, content, _ in _models_and_folders(get):
        yield path, content


def _models_and_folders(get: Get) -> Iterator[tuple[str, Content, Content]]:
    """Path of the key, what the model's `config.json` holds with the overrides, and without."""
    names = {"policy.model_name": get("policy.model_name")}
    if algorithm_spec(get).needs_teacher:
        names["teacher.model_name"] = get("teacher.model_name")
    for path, name in names.items():
        if name is None:  # which another rule reports, as it does a model that cannot be read
            continue
        try:
            content = read_model_config(name)
        except ConfigError:
            if (family := other_family(name)) is None:
                continue
            content = {"model_type": family}
        yield path, with_overrides_of_run(get, content) if path == "policy.model_name" else content, content


def overrides_are_of_positions(get: Get) -> Iterator[str]:
    """A rule: what is said in place of `config.json` is about positions alone."""
    path, given = OVERRIDES, get(OVERRIDES)
    for key, value in given.items():
        if key not in POSITION_KEYS:
            asks = "" if isinstance(value, Mapping | list) else f"{json.dumps(value, default=str)} asks for "
            yield (
                f"{path}.{key}: {asks}another config.json, not supported here: a model is what its folder says, but "
                f"for positions ({', '.join(POSITION_KEYS)}). Change the folder's config.json, and remove this: "
                f"~{path}.{key}{nearest(key, POSITION_KEYS)}"
            )
        elif key in ("rope_scaling", "rope_parameters") and not isinstance(value, Mapping | None):
            yield f"{path}.{key}: {value!r} is not allowed. Allowed: a section of keys, or null."
        elif key in ("rope_theta", "max_position_embeddings") and not (is_number(value) and value > 0):
            yield f"{path}.{key}: {value!r} is not allowed. Allowed: a number above 0."
        elif isinstance(value, Mapping):
            yield from _numbers_of_positions(f"{path}.{key}", value)
    if {"rope_scaling", "rope_parameters"} <= given.keys():
        yield f"{path}.rope_parameters: is rope_scaling under its newer name. Remove one: ~{path}.rope_parameters"


def _numbers_of_positions(path: str, section: Mapping[str, object]) -> Iterator[str]:
    for key, value in section.items():
        if (types := ROPE_KEYS.get(key)) is None:
            yield f"{path}.{key}: unknown key.{nearest(key, ROPE_KEYS)}"
        elif not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            words = {str: "text", bool: "true or false", list: "a list of numbers"}.get(types[0], "a number")
            yield f"{path}.{key}: {json.dumps(value, default=str)} is not allowed. Allowed: {words}."


MODEL_RULES = (overrides_are_of_positions, model_is_honoured, packs_are_split)
MODEL_WARNINGS = (model_keys_without_effect,)
