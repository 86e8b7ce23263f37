"""Kinds of keys of a `config.json`: which values each takes, for the tables of `model_families`.

A kind says None of a value that is taken, and otherwise what is allowed instead.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from nemo_rl_offload.specs.hybrid_layers import EXPERTS, LETTERS, MAMBA, layer_pattern, mtp_layer_pattern

Content = Mapping[str, Any]
"""What a `config.json` holds."""


@dataclass(frozen=True)
class Key:
    """What is taken of one key."""

    text: str
    """For the table of the documents."""
    refuse: Callable[[object, Content], str | None]
    """Of a value that is there: None, or what is allowed instead."""
    neutral: tuple[object, ...] = (None, False, 0)
    """Values that say "not so", where another family has the key."""


def ignored(text: str) -> Key:
    return Key(text, lambda value, content: None)


def is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def whole(minimum: int = 1, or_null: bool = False) -> Key:
    allowed = f"a whole number from {minimum} on" + (", or null" if or_null else "")

    def refuse(value: object, content: Content) -> str | None:
        if value is None:
            return None if or_null else allowed
        return None if is_whole(value) and value >= minimum else allowed

    return Key("honoured", refuse)


def even(or_null: bool = False) -> Key:
    """A whole number of elements that rotary positions can turn in pairs."""
    allowed = "an even number from 2 on" + (", or null" if or_null else "")
    base = whole(minimum=2, or_null=or_null)
    return Key(
        "honoured",
        lambda value, content: allowed if base.refuse(value, content) or (is_whole(value) and value % 2) else None,
    )


def positive(or_null: bool = False) -> Key:
    allowed = "a number above 0" + (", or null" if or_null else "")

    def refuse(value: object, content: Content) -> str | None:
        if value is None:
            return None if or_null else allowed
        return None if is_number(value) and 0 < value < float("inf") else allowed

    return Key("honoured", refuse)


def flag() -> Key:
    return Key("honoured", lambda value, content: None if isinstance(value, bool) else "true or false")


def only(*values: object, because: str = "", neutral: tuple[object, ...] = (None, False, 0)) -> Key:
    shown = " or ".join(_json(value) for value in values)
    reason = f" ({because})" if because else ""

    def refuse(value: object, content: Content) -> str | None:
        taken = any(type(value) is type(one) and value == one for one in values)
        return None if taken else f"{shown}{reason}"

    return Key(f"only {shown}", refuse, neutral)


def _json(value: object) -> str:
    names = {None: "null", True: "true", False: "false"}
    return names[value] if value is None or isinstance(value, bool) else str(value)


def one_of(allowed: Sequence[str]) -> Key:
    text = ", ".join(allowed)
    return Key(f"honoured: {text}", lambda value, content: None if value in allowed else f"one of {text}")


def divides(other: str, minimum: int = 1) -> Key:
    """A whole number that divides another key's."""
    base = whole(minimum, or_null=True)

    def refuse(value: object, content: Content) -> str | None:
        total = content.get(other)
        if (refusal := base.refuse(value, content)) or not is_whole(value) or not is_whole(total):
            return refusal
        return None if total % value == 0 else f"a number that divides {other}"

    return Key("honoured", refuse)


def _padding(value: object, content: Content) -> str | None:
    size = content.get("vocab_size")
    if value is None or (is_whole(value) and (not is_whole(size) or -size <= value < size)):
        return None
    return "null, or a token of the vocabulary"


PADDING = Key("no effect", _padding)

_DTYPES = ("float32", "bfloat16", "float16", "float64", "auto")
DTYPE = Key("no effect", lambda value, content: None if value is None or value in _DTYPES else ", ".join(_DTYPES))
"""Of the file's weights; those of a run are `policy.precision`. transformers reads the file by it."""


# --- positions

ROPE_NUMBERS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": (),
}
"""The types of rotary positions, and what numbers each cannot do without."""
POSITION_KEYS = ("rope_scaling", "rope_parameters", "rope_theta", "max_position_embeddings")
"""Keys of a `config.json` about positions."""
MTP_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
"""Keys of a `config.json`: how many layers predict further tokens."""
ROPE_READ: Mapping[str, tuple[str, ...]] = {
    **ROPE_NUMBERS,
    "yarn": (
        *("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"),
        *("mscale", "mscale_all_dim", "truncate"),
    ),
    "llama3": (*ROPE_NUMBERS["llama3"], "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor", "original_max_position_embeddings", "attention_factor", "factor"),
}
"""What transformers reads for each type, beside what it reads for all."""
_ROPE_OF_ALL = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
_ROPE_OR_NULL = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
_ROPE_OPTIONS = (
    *("rope_theta", "original_max_position_embeddings", "partial_rotary_factor", "factor"),
    *_ROPE_OR_NULL,
)
ROPE_KEYS: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("rope_type", "type"), (str,)),
    "truncate": (bool,),
    **dict.fromkeys(("short_factor", "long_factor"), (list,)),
    **dict.fromkeys((*_ROPE_OPTIONS, *ROPE_NUMBERS["llama3"]), (int, float)),
    **dict.fromkeys(_ROPE_OR_NULL, (int, float, type(None))),
}
"""Keys of a section about rotary positions, and the types of their values."""
LAYER_TYPES = ("full_attention", "sliding_attention")
LENGTH_LIMITS: Mapping[str, tuple[str, Callable[[Content], Any]]] = {
    "dynamic": ("max_position_embeddings", lambda content: content.get("max_position_embeddings")),
    "longrope": ("original_max_position_embeddings", lambda content: original_positions(content)),
}
"""Types that turn positions otherwise in sequences that are longer than a key says: how long the longest of a batch is
decides for all. Shorter ones are honoured."""


def rope_section(content: Content) -> Content:
    """`rope_parameters` or, in older files, `rope_scaling`, which transformers prefers where both are there."""
    section = content.get("rope_scaling") or content.get("rope_parameters") or {}
    return section if isinstance(section, Mapping) else {}


def rope_type(content: Content) -> str:
    """The type of rotary positions, `default` where none is named."""
    section = rope_section(content)
    return str(section.get("rope_type") or section.get("type") or "default")


def unread_rope_keys(section: Content) -> list[str]:
    """What transformers does not read for the section's type of rotary positions; nothing of a type not known."""
    kind = rope_type({"rope_scaling": section})
    read = ROPE_READ.get(kind, tuple(ROPE_KEYS))
    return [key for key in section if key not in (*_ROPE_OF_ALL, *read)]


def unknown_rope_keys(content: Content) -> list[str]:
    """Paths of what transformers does not read of rotary positions, such as `rope_scaling.attn_factor`."""
    sections = {name: content.get(name) for name in ("rope_parameters", "rope_scaling")}
    for name, section in list(sections.items()):
        if isinstance(section, Mapping) and (layers := {key: section[key] for key in LAYER_TYPES if key in section}):
            sections |= {f"{name}.{key}": each for key, each in layers.items()}
            sections[name] = {key: value for key, value in section.items() if key not in layers}
    return [
        f"{name}.{key}"
        for name, section in sections.items()
        if isinstance(section, Mapping)
        for key in unread_rope_keys(section)
    ]


def with_overrides(content: Content, overrides: Content) -> Content:
    """`content` of a `config.json` with keys of `POSITION_KEYS` as `overrides` say, in the file's own form.

    The base of the frequencies stays, where nothing else is said; so does the share of a head that has positions.
    """
    if not overrides:
        return content
    found = {**content, **{key: value for key, value in overrides.items() if not key.startswith("rope_")}}
    if not any(key.startswith("rope_") for key in overrides):
        return found
    before = rope_section(content)
    named = [overrides[key] for key in ("rope_scaling", "rope_parameters") if key in overrides]
    if not all(isinstance(section, Mapping | None) for section in named):
        return {**found, **overrides}  # which `refusals` and the rules name
    section = dict((named[0] or {}) if named else before)
    theta = overrides.get("rope_theta", section.pop("rope_theta", before.get("rope_theta", content.get("rope_theta"))))
    if "partial_rotary_factor" in before:
        section.setdefault("partial_rotary_factor", before["partial_rotary_factor"])
    is_new = "rope_parameters" in content and not content.get("rope_scaling")
    base = {} if theta is None else {"rope_theta": theta}
    for key in ("rope_parameters", "rope_scaling", "rope_theta"):
        found.pop(key, None)
    if is_new:
        return {**found, "rope_parameters": {"rope_type": "default", **section, **base}}
    return {**found, "rope_scaling": section or None, **base}


def overrides_of_run(content: Content, overrides: Content, mtp_num_layers: int | None) -> Content:
    """What a run says in place of a `config.json` that holds `content`: `overrides` of positions, and that layers which
    predict further tokens are left out, where it wants 0 of them."""
    left_out = [key for key in MTP_LAYERS if content.get(key)] if mtp_num_layers == 0 else []
    return {**overrides, **dict.fromkeys(left_out, 0)}


def positions_of(content: Content) -> int:
    """How many positions a stretched rotation says that it is for; 0 where it does not say."""
    section = rope_section(content)
    factor, original = section.get("factor"), section.get("original_max_position_embeddings")
    return int(factor * original) if is_number(factor) and is_number(original) else 0


def rope(
    types: Sequence[str],
    extra: Callable[[Content], str | None] = lambda section: None,
    *,
    is_partial: bool = False,
) -> Key:
    def refuse(value: object, content: Content) -> str | None:
        if value is None or value == {}:
            return None
        if not isinstance(value, Mapping):
            return 'an object such as {"rope_type": "default"}, or null'
        if each := [key for key, one in value.items() if isinstance(one, Mapping)]:
            return f"one set of numbers for all layers, and not one for each of {', '.join(each)}"
        name = value.get("rope_type", value.get("type", "default"))
        if name not in types:
            return f"rope_type {', '.join(types)}, and not {name!r}"
        for key in ROPE_NUMBERS[name]:
            if not is_number(value.get(key)) or value[key] <= 0:
                return f"a {key} above 0 beside rope_type {name}"
        for key in _ROPE_OPTIONS:
            option = value.get(key)
            if option is not None and not (is_number(option) and 0 <= option < float("inf")):
                return f"numbers from 0 on, and not {key} {option!r}"
        share = value.get("partial_rotary_factor")
        if share is not None and (refusal := (PARTIAL_ROTARY if is_partial else WHOLE_ROTARY).refuse(share, content)):
            return f"partial_rotary_factor {refusal}"
        return _rope_details(name, value) or extra(value)

    return Key(f"honoured: {', '.join(types)}", refuse)


def rope_by_layers(types: Sequence[str]) -> Key:
    """A section for each of `LAYER_TYPES`, one of which may be left out; each names its type.

    transformers writes two keys beside them that say nothing, where all layers are of one type.
    """
    of_one, written = rope(types), {"rope_type": "default", "rope_theta": None}

    def refuse(value: object, content: Content) -> str | None:
        if value is None or value == {}:
            return None
        given = value if isinstance(value, Mapping) else {"": value}
        sections = {key: section for key, section in given.items() if (key, section) not in written.items()}
        if not sections or not all(key in LAYER_TYPES for key in sections):
            return f"a section for each of {' and '.join(LAYER_TYPES)}, or null"
        refused = ((key, _named_rope(of_one, section, content)) for key, section in sections.items())
        return next((f"in {key}: {refusal}" for key, refusal in refused if refusal is not None), None)

    return Key(f"{of_one.text}, for each of {' and '.join(LAYER_TYPES)}", refuse)


def rope_of_global_layers(types: Sequence[str]) -> Key:
    """Older files' section: of the layers without a window alone."""
    of_one = rope(types)
    return Key(
        f"{of_one.text}, of full_attention",
        lambda value, content: None if value is None else _named_rope(of_one, value, content),
    )


def _named_rope(of_one: Key, section: object, content: Content) -> str | None:
    """Of a section that transformers lays over one of the type `default`: another name of the key would be lost."""
    if isinstance(section, Mapping) and "rope_type" in section and "type" not in section:
        if "rope_theta" in section and section["rope_theta"] is None:
            return "a rope_theta above 0"
        return of_one.refuse(section, content)
    is_old = isinstance(section, Mapping) and "type" in section and "rope_type" not in section
    return f"an object with a rope_type, and no type{'. Rename type to rope_type' if is_old else ''}"


def original_positions(content: Mapping[str, Any]) -> Any:
    """How long the sequences were that a stretched rotation begins with, as transformers finds it: a key beside the
    section, which Phi-3 has, comes first. None where the file leaves that to the model's class."""
    beside, longest = content.get("original_max_position_embeddings"), content.get("max_position_embeddings")
    return beside or rope_section(content).get("original_max_position_embeddings", longest)


def rotation_factor(content: Mapping[str, Any]) -> float:
    """What cosine and sine are multiplied by: transformers' attention factor (`modeling_rope_utils`) of a `config.json`
    that is honoured, without latent attention."""
    section: Mapping[str, Any] = rope_section(content)
    if content.get("model_type") == "gpt_oss" and not section:
        section = {"rope_type": "yarn", "factor": 32.0}  # its class's
    if (kind := rope_type({"rope_parameters": section})) not in ("yarn", "longrope"):
        return 1.0
    if (given := section.get("attention_factor")) is not None:
        return float(given)
    original, factor = original_positions(content), section.get("factor")
    if factor is None:
        factor = content.get("max_position_embeddings", original) / original
    if factor <= 1:
        return 1.0
    if kind == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(original))
    scale, of_scores = section.get("mscale"), section.get("mscale_all_dim")
    if not (scale and of_scores):
        scale, of_scores = 1.0, 0.0
    return (1 + 0.1 * scale * math.log(factor)) / (1 + 0.1 * of_scores * math.log(factor))


def _rope_details(name: str, section: Content) -> str | None:
    low, high = section.get("low_freq_factor"), section.get("high_freq_factor")
    if name == "llama3" and high <= low:  # type: ignore[operator]
        return "a high_freq_factor above low_freq_factor"
    if section.get("rope_theta") == 0 or section.get("original_max_position_embeddings") == 0:
        return "a rope_theta and an original_max_position_embeddings above 0"
    if not isinstance(section.get("truncate", True), bool):
        return "truncate true or false"
    for key in ("short_factor", "long_factor") if name == "longrope" else ():
        factors = section.get(key)
        if not isinstance(factors, list) or not all(is_number(factor) and factor > 0 for factor in factors):
            return f"a {key} that is a list of numbers above 0"
    return None


def latent_rope(section: Content) -> str | None:
    """Megatron's latent attention reads its own form of yarn."""
    if section.get("attention_factor") is not None:
        return "no attention_factor beside latent attention"
    if bool(section.get("mscale_all_dim")) != bool(section.get("mscale")):
        return "mscale and mscale_all_dim, both or none"
    if section.get("truncate", True) is not True:
        return "truncate true"
    return None


def latent_rope_of_v2(section: Content) -> str | None:
    if section.get("mscale_all_dim"):
        return "no mscale_all_dim (DeepSeek's own code scales the softmax by it, and transformers' does not)"
    return latent_rope(section)


def _partial_rotary(value: object, content: Content) -> str | None:
    return None if value is None or (is_number(value) and 0 < value <= 1) else "a number above 0, at most 1"


PARTIAL_ROTARY = Key("honoured", _partial_rotary)
WHOLE_ROTARY = Key(
    "only 1",
    lambda value, content: None if value is None or (is_number(value) and value == 1) else "1",
)


# --- windows


def same_as(other: str) -> Key:
    """Another key's value."""
    return Key(other, lambda value, content: None if value == content.get(other) else other)


def layer_types(value: object, content: Content) -> str | None:
    if value is None:
        return None
    if not isinstance(value, list) or any(one not in LAYER_TYPES for one in value):
        return f"a list of {' and '.join(LAYER_TYPES)}"
    if len(value) != content.get("num_hidden_layers"):
        return f"a list of num_hidden_layers, {content.get('num_hidden_layers')}"
    is_off = content.get("use_sliding_window", content.get("model_type") not in ("qwen2", "qwen3")) is False
    if "sliding_attention" in value and (is_off or not content.get("sliding_window")):
        return "sliding_attention beside a sliding_window that is used"
    return None


def delta_layer_types(value: object, content: Content) -> str | None:
    """Of layers that are a gated delta net, or attention."""
    kinds = ("linear_attention", "full_attention")
    if value is None:
        return None
    if not isinstance(value, list) or any(one not in kinds for one in value):
        return f"a list of {' and '.join(kinds)}"
    if len(value) != content.get("num_hidden_layers"):
        return f"a list of num_hidden_layers, {content.get('num_hidden_layers')}"
    return None


WINDOWS = {
    "sliding_window": whole(or_null=True),
    "layer_types": Key("honoured", layer_types),
}
QWEN_WINDOWS = {
    **WINDOWS,
    "sliding_window": whole(minimum=0, or_null=True),
    "use_sliding_window": flag(),
    "max_window_layers": whole(minimum=0, or_null=True),
}


# --- hybrid models


def _hybrid_layers(key: str, allowed: str) -> Key:
    def refuse(value: object, content: Content) -> str | None:
        is_left_out = value is None and (
            key == "layers_block_type" or isinstance(content.get("layers_block_type"), list)
        )
        is_taken = is_left_out or layer_pattern({"hybrid_override_pattern": "", key: value})
        return None if is_taken else allowed

    return Key("honoured", refuse)


def _hybrid_mtp(value: object, content: Content) -> str | None:
    """Megatron-Bridge has no names for a Mamba-2 layer that predicts a further token."""
    without, pattern = "0 (`policy.megatron_cfg.mtp_num_layers: 0` leaves them out)", mtp_layer_pattern(content)
    if type(value) is not int or value not in (0, 1):
        return f"{without}, or 1"
    has_experts = EXPERTS in (layer_pattern(content) or "")
    if not value or (pattern and MAMBA not in pattern and (has_experts or EXPERTS not in pattern)):
        return None
    return (
        f"{without}, or 1 where mtp_hybrid_override_pattern or mtp_layers_block_type "
        f"(here {'neither' if pattern is None else json.dumps(pattern)}) has attention (*), MLPs (-) and, as the other "
        "layers do, experts (E)"
    )


HYBRID_LAYERS = {
    "hybrid_override_pattern": _hybrid_layers(
        "hybrid_override_pattern", f"a letter for each layer, of {''.join(LETTERS.values())}"
    ),
    "layers_block_type": _hybrid_layers("layers_block_type", f"a list of {', '.join(LETTERS)}"),
    "mtp_hybrid_override_pattern": ignored("honoured"),
    "mtp_layers_block_type": ignored("honoured"),
    "num_nextn_predict_layers": Key("only 0 or 1", _hybrid_mtp),
}


_INFINITY = (float("inf"), {"__float__": "Infinity"})
"""As JSON's readers have it, and as transformers writes it."""


def _any_step(value: object, content: Content) -> str | None:
    least, most = value if isinstance(value, list | tuple) and len(value) == 2 else (None, None)
    return None if is_number(least) and least == 0 and most in _INFINITY else "0 and Infinity"


ANY_STEP = Key("only 0 and Infinity", _any_step)
"""How large a step of a Mamba-2 layer's heads may be."""


# --- experts


def layer_numbers(value: object, content: Content) -> str | None:
    number = content.get("num_hidden_layers")
    last = number - 1 if is_whole(number) else float("inf")
    if value is None or (isinstance(value, list) and all(is_whole(one) and 0 <= one <= last for one in value)):
        return None
    return "a list of layers, counted from 0"


def dense_first(value: object, content: Content) -> str | None:
    """Kinds of the MLPs of layers: a dense one, and experts in all others."""
    number = content.get("num_hidden_layers")
    others = number - 1 if is_whole(number) else 0
    return None if value in (None, ["dense", *["sparse"] * others]) else "null, or dense once and then sparse"


def experts_chosen(minimum: int = 1) -> Key:
    """How many experts a token has; from 2 on where their weights are divided by their sum, which Megatron does not do
    with a single one."""
    base = whole(minimum)

    def refuse(value: object, content: Content) -> str | None:
        counts = (content.get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
        total = next(filter(is_whole, counts), None)
        if (refusal := base.refuse(value, content)) or not is_whole(value) or total is None:
            return refusal
        return None if value <= total else f"at most the number of experts, {total}"

    return Key("honoured", refuse)


ROUTER_TRAINING = {
    "output_router_logits": ignored("no effect"),
    "router_aux_loss_coef": ignored("no effect: `moe_aux_loss_coeff` is the run's"),
}


# --- quantized weights


def quantized(*methods: str) -> Key:
    def refuse(value: object, content: Content) -> str | None:
        if value is None:
            return None
        method = value.get("quant_method") if isinstance(value, Mapping) else value
        if method in methods:
            return None
        allowed = f"quant_method {' or '.join(methods)}, or none" if methods else "none: weights as they are trained"
        return f"{allowed}, and not {method!r}"

    return Key(f"read: {', '.join(methods)}" if methods else "refused", refuse)
