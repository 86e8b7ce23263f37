"""The text part of a multimodal model, which is what is trained of one: its `config.json` and its names of weights.

Such a folder describes a language model in one section of its `config.json`, beside those of its towers, and holds its
weights below a prefix of their own. Here both become those of the family of text models that transformers has for it,
which everything else knows; `megatron/build/text_part.py` reads and writes the weights by these names.

The section is taken as transformers' class of the whole model takes it. Public ones leave out what has the value of its
class, sizes among it, so that these values are here (a test compares them). What stands beside the section has no
effect there, but for tied embeddings, which the whole model's own key decides. So a key of the text model beside it is
refused, unless both say the same.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.specs.model_families import FAMILIES
from nemo_rl_offload.specs.model_keys import Content

SECTION = "text_config"
_TIED = "tie_word_embeddings"


@dataclass(frozen=True)
class TextPart:
    """Of a family of multimodal models."""

    family: str
    """Of its text models, a `model_type`."""
    is_tied: bool
    """`tie_word_embeddings` of the whole model where its `config.json` says nothing."""
    other_keys: Collection[str]
    """Of the whole model's `config.json`: of images, and the sections."""
    towers: tuple[str, ...]
    """How names of the weights that are not trained begin, below `model.` in some folders."""
    defaults: Mapping[str, object]
    """What the section means where it says nothing."""


_OF_QWEN = (
    *(SECTION, "vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"),
)
_DELTA_NETS = {
    "vocab_size": 248320,
    "num_attention_heads": 16,
    "head_dim": 256,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
TEXT_PARTS: Mapping[str, TextPart] = {
    "gemma3": TextPart(
        family="gemma3_text",
        is_tied=True,
        other_keys=(
            *(SECTION, "vision_config", "mm_tokens_per_image", "image_token_index", "boi_token_index"),
            *("eoi_token_index", "image_token_id", "boi_token_id", "eoi_token_id"),
        ),
        towers=("vision_tower.", "multi_modal_projector."),
        defaults={
            "vocab_size": 262208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "max_position_embeddings": 131072,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
        },
    ),
    "qwen3_5": TextPart(
        family="qwen3_5_text",
        is_tied=False,
        other_keys=_OF_QWEN,
        towers=("visual.",),
        defaults={
            **_DELTA_NETS,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 32,
            "num_key_value_heads": 4,
        },
    ),
    "qwen3_5_moe": TextPart(
        family="qwen3_5_moe_text",
        is_tied=False,
        other_keys=_OF_QWEN,
        towers=("visual.",),
        defaults={
            **_DELTA_NETS,
            "hidden_size": 2048,
            "num_hidden_layers": 40,
            "num_key_value_heads": 2,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
        },
    ),
}
"""Multimodal models whose text part is trained, by `model_type`."""


def text_part(content: Content) -> TextPart | None:
    """Of what a `config.json` holds; None for a text model, and for a multimodal one that is not trained."""
    name = content.get("model_type")
    return TEXT_PARTS.get(name) if isinstance(name, str) else None


def text_content(content: Content) -> Content:
    """What a `config.json` of the text part alone would hold; `content` itself where it is of no multimodal model.

    Raises ConfigError for what cannot be read as one, without the file's name.
    """
    part = text_part(content)
    if part is None:
        return content
    whole, section = content["model_type"], content.get(SECTION)
    if not isinstance(section, Mapping):
        raise ConfigError(f"{SECTION} of a {whole} is an object, and not {section!r}. Is the download complete?")
    if section.get("model_type", part.family) != part.family:
        raise ConfigError(
            f"{SECTION} of a {whole} is a {section['model_type']!r}. Only a {part.family} is trained in it."
        )
    text = {**part.defaults, **section}
    beside = {key: value for key, value in content.items() if key not in (*part.other_keys, "model_type", _TIED)}
    if misplaced := sorted(_misplaced(part, beside, text)):
        raise ConfigError(
            f"{', '.join(misplaced)} beside {SECTION} has no effect in a {whole}. Take it out, or write it into "
            f"{SECTION} if the model is to have it."
        )
    tied = content.get(_TIED, part.is_tied)
    if text.get(_TIED, tied) != tied:
        raise ConfigError(
            f"{_TIED} is {tied!r} of a {whole}, and {text[_TIED]!r} in its {SECTION}. Programs read one or the other: "
            "make them the same."
        )
    return {**beside, **text, "model_type": part.family, _TIED: tied}


def _misplaced(part: TextPart, beside: Content, text: Content) -> Iterator[str]:
    for key, value in beside.items():
        of_text = FAMILIES[part.family].get(key)
        has_effect = of_text is not None and not of_text.text.startswith("no effect") and key != "quantization_config"
        if has_effect and text.get(key) != value:
            yield key


def changed_text(content: Content, change: Callable[[Content], Content]) -> Content:
    """`content` of a `config.json`, of whose text part `change` returns another."""
    return change(content) if text_part(content) is None else {**content, SECTION: change(content[SECTION])}


# --- names of weights

_BELOW = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
"""Prefixes of the text part's weights, as transformers and public folders have one or the other, and in text models.
`lm_head` also stands by its own name."""


def text_name(name: str) -> str:
    """The text model's name of a weight that a multimodal folder calls `name`; `name` itself where it has no prefix."""
    found = (own + name.removeprefix(below) for below, own in _BELOW.items() if name.startswith(below))
    return next(found, name)


def module_name(name: str) -> str:
    """The name in transformers' multimodal model of what the text model calls `name`: a weight, or a module."""
    return f"model.language_model.{name.removeprefix('model.')}" if name.startswith("model.") else name


def is_of_tower(part: TextPart, name: str) -> bool:
    """Whether a folder's weight belongs to what is not trained."""
    return name.removeprefix("model.").startswith(part.towers)
