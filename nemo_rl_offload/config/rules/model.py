"""Rules about the model that a `config.json` describes: what of it is honoured (`specs/model_families.py`)."""

from collections.abc import Iterator

from nemo_rl_offload.config.rules.rule import MEGATRON, Get, algorithm_spec, megatron, read_model_config
from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.specs.catalogue import other_family
from nemo_rl_offload.specs.model_families import (
    SPLIT_PACKS,
    TORCH_LAYERS,
    needs_torch_layers,
    refusals,
    unknown_keys,
    windows_or_sinks,
)
from nemo_rl_offload.specs.model_keys import Content


def model_is_honoured(get: Get) -> Iterator[str]:
    """A rule: nothing in the `config.json` of the model, or of the teacher, is left out."""
    for path, content in _models(get):
        for refusal in refusals(content, get("policy.max_total_sequence_length")):
            yield f"{path}: {refusal}"
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
        yield path, content


MODEL_RULES = (model_is_honoured, packs_are_split)
MODEL_WARNINGS = (model_keys_without_effect,)
