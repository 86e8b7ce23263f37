"""The text part of a multimodal model against transformers' own classes, and public files."""

from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.planner.cost.parameters import model_parameters
from nemo_rl_offload.specs.catalogue import load_model_shape
from nemo_rl_offload.specs.model_families import FAMILIES, refusals, unknown_keys
from nemo_rl_offload.specs.multimodal import (
    TEXT_PARTS,
    changed_text,
    is_of_tower,
    module_name,
    text_content,
    text_name,
)

GEMMA_4B: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "initializer_range": 0.02,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0.dev0",
    "vision_config": {"hidden_size": 1152, "image_size": 896, "model_type": "siglip_vision_model"},
}
QWEN: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "image_token_id": 248056,
    "model_type": "qwen3_5",
    "text_config": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "dtype": "bfloat16",
        "eos_token_id": 248044,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 2560,
        "initializer_range": 0.02,
        "intermediate_size": 9216,
        "layer_types": [*["linear_attention"] * 3, "full_attention"] * 8,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "model_type": "qwen3_5_text",
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": 16,
        "num_hidden_layers": 32,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "tie_word_embeddings": True,
        "use_cache": True,
        "vocab_size": 248320,
    },
    "tie_word_embeddings": True,
    "video_token_id": 248057,
    "vision_config": {"depth": 24, "model_type": "qwen3_5"},
    "vision_end_token_id": 248054,
    "vision_start_token_id": 248053,
}
OF_EXPERTS = {
    "model_type": "qwen3_5_moe_text",
    "moe_intermediate_size": 512,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 512,
}
PUBLIC = {
    "gemma3": GEMMA_4B,
    "qwen3_5": QWEN,
    "qwen3_5_moe": QWEN | {"model_type": "qwen3_5_moe", "text_config": QWEN["text_config"] | OF_EXPERTS},
}
EACH = pytest.mark.parametrize("name", TEXT_PARTS)


@EACH
def test_a_section_means_what_transformers_takes_it_for(name: str) -> None:
    content = text_content(PUBLIC[name])
    assert refusals(content) == []
    of_images = [f"rope_parameters.{key}" for key in ("mrope_interleaved", "mrope_section")]
    assert unknown_keys(content) == ([] if name == "gemma3" else of_images)
    whole = CONFIG_MAPPING[name].from_dict(PUBLIC[name])
    alone = CONFIG_MAPPING[TEXT_PARTS[name].family].from_dict(content)
    expected, found = (config.to_dict() for config in (whole.text_config, alone))
    assert {key for key in FAMILIES[TEXT_PARTS[name].family] if expected.get(key) != found.get(key)} <= {
        *("architectures", "dtype", "eos_token_id", "transformers_version", "torch_dtype"),
    }


@EACH
def test_what_a_section_leaves_out_is_transformers_own(name: str) -> None:
    part = TEXT_PARTS[name]
    expected = CONFIG_MAPPING[part.family]()
    assert {key: getattr(expected, key) for key in part.defaults} == part.defaults
    assert CONFIG_MAPPING[name]().tie_word_embeddings == part.is_tied


@EACH
def test_every_key_of_the_whole_model_is_known(name: str) -> None:
    part, own = TEXT_PARTS[name], set(CONFIG_MAPPING[name]().to_dict()) | set(CONFIG_MAPPING[name].attribute_map)
    assert own <= {*part.other_keys, *FAMILIES[part.family], "tie_word_embeddings"}


@EACH
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"text_config": None}, "text_config of a .* is an object, and not None"),
        ({"tie_word_embeddings": "x"}, "tie_word_embeddings is 'x' of a .*, and .* in its text_config"),
        ({"hidden_size": 1, "head_dim": 2}, "head_dim, hidden_size beside text_config has no effect in a"),
    ],
)
def test_a_section_that_is_none_or_contradicted_is_refused(name: str, change: dict[str, Any], said: str) -> None:
    section = PUBLIC[name]["text_config"] | {"tie_word_embeddings": True}
    with pytest.raises(ConfigError, match=said):
        text_content({**PUBLIC[name], "text_config": section, **change})


def test_another_language_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"text_config of a gemma3 is a 'llama'. Only a gemma3_text is trained in it"):
        text_content({**GEMMA_4B, "text_config": {"model_type": "llama"}})


def test_keys_beside_the_section_are_refused_as_in_a_text_model() -> None:
    quantized = {"quantization_config": {"quant_method": "bitsandbytes"}}
    assert refusals(text_content(GEMMA_4B | quantized))[0].startswith("quantization_config")
    assert "logit_scale 2.0" in refusals(text_content(GEMMA_4B | {"logit_scale": 2.0}))[0]
    assert "tie_word_embeddings False" in refusals(text_content(GEMMA_4B | {"tie_word_embeddings": False}))[0]
    assert unknown_keys(text_content(GEMMA_4B | {"mine": 1})) == ["mine"]
    assert refusals(text_content(GEMMA_4B | {"hidden_size": 2560})) == []


def test_a_text_model_is_left_as_it_is() -> None:
    content = {"model_type": "llama", "text_config": {"vocab_size": 4}}
    assert text_content(content) is content
    assert changed_text(content, lambda text: {**text, "new": 1}) == {**content, "new": 1}


def test_a_change_is_of_the_section() -> None:
    changed = changed_text(GEMMA_4B, lambda text: {**text, "sliding_window": 1})
    assert changed == GEMMA_4B | {"text_config": GEMMA_4B["text_config"] | {"sliding_window": 1}}


@pytest.mark.parametrize(
    ("name", "text", "module"),
    [
        ("language_model.model.norm.weight", "model.norm.weight", "model.language_model.norm.weight"),
        ("model.language_model.norm.weight", "model.norm.weight", "model.language_model.norm.weight"),
        ("language_model.lm_head.weight", "lm_head.weight", "lm_head.weight"),
        ("lm_head.weight", "lm_head.weight", "lm_head.weight"),
    ],
)
def test_names_of_weights(name: str, text: str, module: str) -> None:
    assert text_name(name) == text
    assert module_name(text) == module
    assert not any(is_of_tower(part, name) for part in TEXT_PARTS.values())


@pytest.mark.parametrize("prefix", ["", "model."])
def test_towers_are_no_part_of_the_text(prefix: str) -> None:
    assert is_of_tower(TEXT_PARTS["gemma3"], f"{prefix}vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight")
    assert is_of_tower(TEXT_PARTS["gemma3"], f"{prefix}multi_modal_projector.mm_input_projection_weight")


@pytest.mark.parametrize(
    ("name", "published"),
    [("google/gemma-3-4b-it", 3.884e9), ("google/gemma-3-12b-pt", 11.771e9), ("google/gemma-3-27b-it", 27.016e9)],
)
def test_public_models_have_the_published_parameters(name: str, published: float) -> None:
    """Of embedding and language model: table 1 of the Gemma 3 report (arXiv 2503.19786)."""
    assert model_parameters(load_model_shape(name, None)) == pytest.approx(published, rel=0.001)
