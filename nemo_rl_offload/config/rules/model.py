"""Rules about the model that a `config.json` describes: what of it is honoured (`specs/model_families.py`)."""

import json
from collections.abc import Iterator, Mapping

from nemo_rl_offload.config.rules.rule import (
    MEGATRON,
    Get,
    algorithm_spec,
    megatron,
    read_model_config,
)
from nemo_rl_offload.errors import ConfigError, nearest
from nemo_rl_offload.specs.catalogue import other_content
from nemo_rl_offload.specs.model_families import (
    SPLIT_PACKS,
    TORCH_LAYERS,
    needs_torch_layers,
    refusals,
    unknown_keys,
    windows_or_sinks,
)
from nemo_rl_offload.specs.model_keys import (
    POSITION_KEYS,
    ROPE_KEYS,
    ROPE_READ,
    Content,
    is_number,
    overrides_of_run,
    rope_type,
    unread_rope_keys,
    with_overrides,
)

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
            yield f"{path}: transformers does not read this in its config.json for this family: {keys}."


def _models(get: Get) -> Iterator[tuple[str, Content]]:
    for path, content, _ in _models_and_folders(get):
        yield path, content


def _models_and_folders(get: Get) -> Iterator[tuple[str, Content, Content]]:
    """Path of the key, what the model's `config.json` holds with the overrides, and without.

    Overrides that are refused by themselves count as none.
    """
    names = {"policy.model_name": get("policy.model_name")}
    overrides = {} if any(overrides_are_of_positions(get)) else get(OVERRIDES)
    if algorithm_spec(get).needs_teacher:
        names["teacher.model_name"] = get("teacher.model_name")
    for path, name in names.items():
        if name is None:  # which another rule reports, as it does a model that cannot be read
            continue
        try:
            content = read_model_config(name)
        except ConfigError:
            if (known := other_content(name)) is None:
                continue
            content = known
        of_run = overrides_of_run(content, overrides, megatron(get, "mtp_num_layers"))
        yield path, with_overrides(content, of_run) if path == "policy.model_name" else content, content


def overrides_are_of_positions(get: Get) -> Iterator[str]:
    """A rule: what is said in place of `config.json` is about positions alone."""
    path, given = OVERRIDES, get(OVERRIDES)
    for key, value in given.items():
        if key not in POSITION_KEYS:
            asks = "" if isinstance(value, Mapping | list) else f"{_json(value)} asks for "
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
    sections = [key for key in ("rope_scaling", "rope_parameters") if key in given]
    if len(sections) > 1:
        yield f"{path}.rope_parameters: is rope_scaling under its newer name. Remove one: ~{path}.rope_parameters"
        return
    for key in sections:
        section = given[key] if isinstance(given[key], Mapping) else {}
        theta = section.get("rope_theta")
        if theta is not None and given.get("rope_theta", theta) != theta:
            yield (
                f"{path}.rope_theta: {_json(given['rope_theta'])}, and {key}.rope_theta is {_json(theta)}. Remove one: "
                f"~{path}.rope_theta"
            )


def _numbers_of_positions(path: str, section: Mapping[str, object]) -> Iterator[str]:
    unread = unread_rope_keys(section)
    for key, value in section.items():
        if (types := ROPE_KEYS.get(key)) is None:
            yield f"{path}.{key}: unknown key.{nearest(key, ROPE_KEYS)}"
        elif not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            words = {str: "text", bool: "true or false", list: "a list of numbers"}.get(types[0], "a number")
            yield f"{path}.{key}: {_json(value)} is not allowed. Allowed: {words}."
        elif key in unread:
            readers = ", ".join(kind for kind, read in ROPE_READ.items() if key in read)
            kind = rope_type({"rope_scaling": section})
            none = "" if section.keys() & {"rope_type", "type"} else ", which is meant where none is given"
            yield (
                f"{path}.{key}: is not read with rope_type {kind}{none}. Give a rope_type that reads it ({readers}), "
                f"or remove this: ~{path}.{key}"
            )
    name = section.get("rope_type")
    if name is not None and section.get("type", name) != name:
        yield f"{path}.type: {_json(section['type'])}, and rope_type is {_json(name)}. Remove one: ~{path}.type"
    pair = [key for key in ("mscale", "mscale_all_dim") if section.get(key)]
    for key in () if unread else pair:
        other = "mscale_all_dim" if key == "mscale" else "mscale"
        if other not in section:
            yield f"{path}.{key}: is read only together with {other}. Give both, or none: ~{path}.{key}"
        elif section.get("attention_factor") is not None:
            yield f"{path}.{key}: is not read beside attention_factor. Remove one: ~{path}.{key}"


def _json(value: object) -> str:
    return json.dumps(value, default=str)


MODEL_RULES = (overrides_are_of_positions, model_is_honoured, packs_are_split)
MODEL_WARNINGS = (model_keys_without_effect,)
