"""Rules about speculative decoding (`vllm_kwargs.speculative_config`), in vLLM's own keys.

A draft of some tokens comes from a small model, or from the layer that the model has for predicting a further token.
The model computes all of them at once and takes those that it would have sampled: responses keep their distribution,
and their log-probabilities are the model's own.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from nemo_rl_offload.config.rules.rule import Get, Rule, read_model_config, read_shape
from nemo_rl_offload.config.rules.vllm import CFG, GENERATION, KWARGS, is_used
from nemo_rl_offload.errors import ConfigError, nearest
from nemo_rl_offload.specs.hybrid_layers import ATTENTION, EXPERTS, mtp_layer_pattern

SPECULATIVE = f"{KWARGS}.speculative_config"
MTP_METHODS = ("mtp", "deepseek_mtp")
"""The model's own layer drafts."""
METHODS = ("draft_model", *MTP_METHODS)
FAMILIES_WITH_MTP = ("deepseek_v3", "nemotron_h")
MOST_TOKENS = 32
_ALLOWED = f"draft_model, with the folder of a small model as model; {' or '.join(MTP_METHODS)}, without model"
_BY_MODEL = "Set draft_model, and the folder of a small model as model, or remove the section."
_KEYS = ("method", "model", "num_speculative_tokens", "draft_tensor_parallel_size")


def drafts(get: Get) -> Mapping[str, Any] | None:
    """The section; None where nothing is drafted, or vLLM does not generate."""
    section = get(KWARGS).get("speculative_config") if is_used(get) else None
    return section if isinstance(section, Mapping) else None


def _keys(get: Get) -> Iterator[str]:
    section = get(KWARGS).get("speculative_config")
    if section is None:
        return
    if not isinstance(section, Mapping):
        shown = json.dumps(section, default=str)[:60]
        yield f"{SPECULATIVE}: {shown} is not allowed. Allowed: a section with {', '.join(_KEYS)}."
        return
    for key in section:
        if key not in _KEYS:
            yield f"{SPECULATIVE}.{key}: not supported here.{nearest(str(key), _KEYS)} Allowed: {', '.join(_KEYS)}."
    method = section.get("method")
    if method is None:
        yield f"{SPECULATIVE}.method: missing value. Allowed: {_ALLOWED}."
    elif method not in METHODS:
        yield (
            f"{SPECULATIVE}.method: {json.dumps(method, default=str)[:60]} asks for drafts by another method, not "
            f"supported here: nobody has tried it.{nearest(str(method), METHODS)} Allowed: {_ALLOWED}."
        )
    value = section.get("num_speculative_tokens")
    if type(value) is not int or not 1 <= value <= MOST_TOKENS:
        wrong = "missing value" if value is None else f"{json.dumps(value, default=str)[:60]} is not allowed"
        yield f"{SPECULATIVE}.num_speculative_tokens: {wrong}. Allowed: a whole number from 1 to {MOST_TOKENS}."
    own, size = section.get("draft_tensor_parallel_size"), get(f"{CFG}.tensor_parallel_size")
    if own is not None and (type(own) is not int or own != size):
        yield (
            f"{SPECULATIVE}.draft_tensor_parallel_size: {json.dumps(own, default=str)[:60]} is not "
            f"{CFG}.tensor_parallel_size, {size}, and nothing else has been tried. Leave it out."
        )


def _what_drafts(get: Get) -> Iterator[str]:
    """The model's layer for it, or a model with the same vocabulary."""
    section = drafts(get)
    if section is None:
        return
    path, method, model = f"{SPECULATIVE}.model", section.get("method"), section.get("model")
    if method == "draft_model" and not isinstance(model, str):
        wrong = "missing value" if model is None else f"{json.dumps(model, default=str)[:60]} is not allowed"
        yield f"{path}: {wrong}. Allowed: text, the folder of the model that drafts."
    try:
        content, shape = read_model_config(get("policy.model_name")), read_shape(get("policy.model_name"))
        other = read_shape(model) if method == "draft_model" and isinstance(model, str) else None
    except ConfigError:  # of which another rule says that it is not there
        return
    if other is not None and other.vocab_size != shape.vocab_size:
        yield (
            f"{path}: has a vocabulary of {other.vocab_size}, and the policy one of {shape.vocab_size}. Take a model "
            "with the policy's tokenizer and vocabulary."
        )
    if method in MTP_METHODS:
        if content.get("model_type") not in FAMILIES_WITH_MTP:
            yield (
                f"{SPECULATIVE}.method: {method} asks for drafts by the model's own layer, not supported here: such "
                f"layers follow updates in {', '.join(FAMILIES_WITH_MTP)} alone. {_BY_MODEL}"
            )
        elif shape.num_mtp_layers != 1:
            yield (
                f"{SPECULATIVE}.method: {method} needs a model with one layer for it (num_nextn_predict_layers), and "
                f"this has {shape.num_mtp_layers}. {_BY_MODEL}"
            )
        elif model is not None:
            yield f"{path}: has no effect with method {method}, where the model's own layer drafts. Remove it."
        elif shape.hybrid_layers and not set(pattern := mtp_layer_pattern(content) or "") <= {ATTENTION, EXPERTS}:
            yield (
                f"{SPECULATIVE}.method: {method} is for attention (*) and experts (E) in mtp_hybrid_override_pattern, "
                f"and this model has {pattern}, which vLLM does not take. {_BY_MODEL}"
            )


def _excluded(get: Get) -> Iterator[str]:
    """What has not been tried beside drafts."""
    if drafts(get) is None:
        return
    unless = {
        f"{GENERATION}.stop_strings": (None, "tokens after a stop string would stay in a response"),
        f"{CFG}.pipeline_parallel_size": (1, "nobody has tried it"),
    }
    for key, (allowed, why) in unless.items():
        if (value := get(key)) not in (allowed, []):
            yield f"{key}: {value} is excluded by {SPECULATIVE}: {why}. Set {json.dumps(allowed)}, or remove that."
    if get("policy.router_replay.enabled"):
        yield (
            f"policy.router_replay.enabled: true is excluded by {SPECULATIVE}: vLLM tells the experts of rejected "
            "drafts too. Remove one of the two."
        )
    if get("policy.hf_config_overrides"):
        yield f"policy.hf_config_overrides: excluded by {SPECULATIVE}: nobody has tried it. Remove one of the two."
    if get(KWARGS).get("async_scheduling"):
        yield (
            f"{KWARGS}.async_scheduling: true is excluded by {SPECULATIVE}: it would not be known which weights a "
            "token is of. Remove it."
        )


SPECULATIVE_RULES: tuple[Rule, ...] = (_keys, _what_drafts, _excluded)
