"""Which models are taken: tables against transformers' own classes, and the files of public models."""

from typing import Any

import pytest
from transformers import CONFIG_MAPPING, LlamaConfig, PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from nemo_rl_offload.specs.catalogue import CATALOGUE
from nemo_rl_offload.specs.model_families import (
    FAMILIES,
    needs_torch_layers,
    refusals,
    unknown_keys,
    windows_or_sinks,
)
from nemo_rl_offload.specs.model_keys import unread_rope_keys
from nemo_rl_offload.specs.model_shape import layer_windows

LLAMA3 = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
PUBLIC: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009],
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": LLAMA3,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.42.3",
        "use_cache": True,
        "vocab_size": 128256,
    },
    "SmolLM2-135M": {
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "is_llama_config": True,
        "max_position_embeddings": 8192,
        "num_attention_heads": 9,
        "num_hidden_layers": 30,
        "num_key_value_heads": 3,
        "rms_norm_eps": 1e-05,
        "rope_interleaved": False,
        "rope_scaling": None,
        "rope_theta": 100000,
        "tie_word_embeddings": True,
        "vocab_size": 49152,
    },
    "Mistral-7B-v0.1": {
        "model_type": "mistral",
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "tie_word_embeddings": False,
        "vocab_size": 32000,
    },
    "Qwen2.5-7B": {
        "model_type": "qwen2",
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "max_position_embeddings": 131072,
        "max_window_layers": 28,
        "num_attention_heads": 28,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 131072,
        "tie_word_embeddings": False,
        "use_mrope": False,
        "use_sliding_window": False,
        "vocab_size": 152064,
    },
    "Qwen3-30B-A3B": {
        "model_type": "qwen3_moe",
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "output_router_logits": False,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "DeepSeek-V3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
        "model_type": "deepseek_v3",
        "attention_bias": False,
        "aux_loss_alpha": 0.001,
        "ep_size": 1,
        "first_k_dense_replace": 3,
        "hidden_act": "silu",
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163840,
        "moe_intermediate_size": 2048,
        "moe_layer_freq": 1,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1,
        "pretraining_tp": 1,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "quantization_config": {"activation_scheme": "dynamic", "quant_method": "fp8", "weight_block_size": [128, 128]},
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "seq_aux": True,
        "tie_word_embeddings": False,
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "v_head_dim": 128,
        "vocab_size": 129280,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss",
        "attention_bias": True,
        "experts_per_token": 4,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2880,
        "initial_context_length": 4096,
        "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "max_position_embeddings": 131072,
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "quantization_config": {"modules_to_not_convert": ["lm_head"], "quant_method": "mxfp4"},
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "vocab_size": 201088,
    },
    "Nemotron-Nano-9B-v2": {
        "architectures": ["NemotronHForCausalLM"],
        "attention_bias": False,
        "chunk_size": 128,
        "conv_kernel": 4,
        "expand": 2,
        "head_dim": 128,
        "hidden_size": 4480,
        "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
        "intermediate_size": 15680,
        "layer_norm_epsilon": 1e-05,
        "mamba_head_dim": 80,
        "mamba_hidden_act": "silu",
        "mamba_num_heads": 128,
        "mamba_proj_bias": False,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "mlp_hidden_act": "relu2",
        "model_type": "nemotron_h",
        "n_groups": 8,
        "num_attention_heads": 40,
        "num_hidden_layers": 56,
        "num_key_value_heads": 8,
        "partial_rotary_factor": 1.0,
        "residual_in_fp32": False,
        "rope_theta": 10000,
        "ssm_state_size": 128,
        "tie_word_embeddings": False,
        "time_step_limit": [0.0, float("inf")],
        "use_bias": False,
        "use_conv_bias": True,
        "vocab_size": 131072,
    },
    "GLM-4.5-Air": {
        "model_type": "glm4_moe",
        "attention_bias": True,
        "first_k_dense_replace": 1,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "max_position_embeddings": 131072,
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 96,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 46,
        "num_key_value_heads": 8,
        "num_nextn_predict_layers": 1,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000,
        "routed_scaling_factor": 1.0,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "use_qk_norm": False,
        "vocab_size": 151552,
    },
    "gemma-3-1b-it": {
        "architectures": ["Gemma3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_logit_softcapping": None,
        "cache_implementation": "hybrid",
        "eos_token_id": [1, 106],
        "final_logit_softcapping": None,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "max_position_embeddings": 32768,
        "model_type": "gemma3_text",
        "num_attention_heads": 4,
        "num_hidden_layers": 26,
        "num_key_value_heads": 1,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06,
        "rope_local_base_freq": 10000,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "vocab_size": 262144,
    },
}
"""What the `config.json` of public models holds."""


@pytest.mark.parametrize("family", FAMILIES)
def test_every_key_of_transformers_is_in_the_table(family: str) -> None:
    common = set(PretrainedConfig().to_dict())
    keys = set(CONFIG_MAPPING[family]().to_dict()) - common
    assert keys - FAMILIES[family].keys() == set()


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_own_defaults_are_taken(family: str) -> None:
    content = CONFIG_MAPPING[family]().to_dict()
    unset = {"num_experts_per_tok": 8, "head_dim": 128} if family in ("deepseek_v2", "glm4_moe") else {}
    assert refusals(content | unset) == []


@pytest.mark.parametrize("name", PUBLIC)
def test_public_models_are_taken(name: str) -> None:
    assert refusals(PUBLIC[name], max_length=4096) == []


@pytest.mark.parametrize("name", CATALOGUE)
def test_the_catalogue_is_taken(name: str) -> None:
    assert refusals(CATALOGUE[name], max_length=4096) == []
    assert unknown_keys(CATALOGUE[name]) == []


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("Qwen2.5-7B", "rope_scaling", {"type": "su", "factor": 2.0}),
        ("Qwen2.5-7B", "rope_scaling", {"type": "linear"}),
        ("Qwen2.5-7B", "use_mrope", True),
        ("Qwen2.5-7B", "dtype", "bf16"),
        ("Qwen2.5-7B", "hidden_act", "gelu_new"),
        ("Qwen2.5-7B", "num_key_value_heads", 5),
        ("Qwen2.5-7B", "quantization_config", {"quant_method": "awq"}),
        ("Qwen2.5-7B", "attention_bias", True),
        ("Qwen2.5-7B", "logits_scaling", 8.0),
        ("Qwen2.5-7B", "num_experts", 4),
        ("Llama-3.1-8B", "final_logit_softcapping", 30.0),
        ("Llama-3.1-8B", "partial_rotary_factor", 0.5),
        ("Llama-3.1-8B", "embedding_multiplier", 12.0),
        ("Mistral-7B-v0.1", "sliding_window", 0),
        ("DeepSeek-V3", "scoring_func", "softmax"),
        ("DeepSeek-V3", "rope_interleave", False),
        ("DeepSeek-V3", "moe_layer_freq", 2),
        ("DeepSeek-V3", "num_experts_per_tok", 1),
        ("gpt-oss-20b", "swiglu_limit", 5.0),
        ("gpt-oss-20b", "layer_types", ["linear_attention"] * 24),
        ("GLM-4.5-Air", "norm_topk_prob", False),
        ("Qwen3-30B-A3B", "use_qk_norm", False),
        ("gemma-3-1b-it", "attn_logit_softcapping", 50.0),
        ("gemma-3-1b-it", "final_logit_softcapping", 30.0),
        ("gemma-3-1b-it", "use_bidirectional_attention", True),
        ("gemma-3-1b-it", "hidden_act", "gelu_pytorch_tanh"),
        ("gemma-3-1b-it", "rope_local_base_freq", None),
        ("gemma-3-1b-it", "rope_scaling", {"type": "linear", "factor": 8.0}),
        ("gemma-3-1b-it", "rope_scaling", {"rope_type": "yarn", "factor": 8.0}),
        ("gemma-3-1b-it", "rope_parameters", {"rope_type": "default", "rope_theta": 1e6}),
        ("gemma-3-1b-it", "rope_parameters", {"full_attention": {"rope_type": "linear"}}),
        ("gemma-3-1b-it", "rope_parameters", {"full_attention": {"rope_type": "default", "rope_theta": None}}),
        ("Qwen2.5-7B", "rope_local_base_freq", 10000.0),
        ("Nemotron-Nano-9B-v2", "hybrid_override_pattern", "M-?"),
        ("Nemotron-Nano-9B-v2", "hybrid_override_pattern", None),
        ("Nemotron-Nano-9B-v2", "layers_block_type", [["mamba"]]),
        ("Nemotron-Nano-9B-v2", "layers_block_type", [{}]),
        ("Nemotron-Nano-9B-v2", "layers_block_type", "M-M*"),
        ("Nemotron-Nano-9B-v2", "num_hidden_layers", 55),
        ("Nemotron-Nano-9B-v2", "mamba_d_conv", 4),
        ("Nemotron-Nano-9B-v2", "moe_latent_size", 0),
        ("Nemotron-Nano-9B-v2", "n_groups", 7),
        ("Nemotron-Nano-9B-v2", "time_step_limit", [0.0, 0.1]),
        ("Nemotron-Nano-9B-v2", "use_bias", True),
        ("Qwen3-30B-A3B", "rope_scaling", {"full_attention": {"rope_type": "linear", "factor": 2.0}}),
    ],
)
def test_a_value_that_is_not_honoured_is_refused_by_name(name: str, key: str, value: object) -> None:
    (refusal,) = refusals(PUBLIC[name] | {key: value})
    assert refusal.startswith(f"{key} {value!r} of config.json ")


@pytest.mark.parametrize("value", [None, 1.0, 1])
def test_a_scale_of_one_is_none(value: object) -> None:
    assert refusals(PUBLIC["Qwen2.5-7B"] | {"logits_scaling": value}) == []


def test_all_that_is_refused_is_said_at_once() -> None:
    assert len(refusals(PUBLIC["Llama-3.1-8B"] | {"hidden_act": "relu", "clip_qkv": 8, "head_dim": 7})) == 4


@pytest.mark.parametrize(("name", "hint"), [("qwen4", "qwen3"), ("bert", None), (None, None), (["llama"], None)])
def test_an_unknown_family_is_named(name: object, hint: str | None) -> None:
    (refusal,) = refusals({"model_type": name})
    assert refusal.startswith(f"model_type {name!r} of config.json is not trained here. Families: llama, mistral, ")
    assert (f"Did you mean '{hint}'?" in refusal) == (hint is not None)


@pytest.mark.parametrize(("length", "is_taken"), [(8192, True), (8193, False), (None, True)])
def test_positions_that_depend_on_the_length(length: int | None, is_taken: bool) -> None:
    dynamic = {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "max_position_embeddings": 8192}
    factors = {"short_factor": [1.0] * 64, "long_factor": [2.0] * 64}
    long = {"rope_scaling": {"type": "longrope", **factors, "original_max_position_embeddings": 8192}}
    for rope in (dynamic, long):
        lines = refusals(PUBLIC["Llama-3.1-8B"] | rope, max_length=length)
        assert (lines == []) == is_taken
        assert all("policy.max_total_sequence_length to at most 8192" in line for line in lines)


def test_keys_without_effect_are_told_apart() -> None:
    assert unknown_keys(PUBLIC["SmolLM2-135M"]) == ["is_llama_config", "rope_interleaved"]
    assert unknown_keys(PUBLIC["Llama-3.1-8B"] | {"clip_qkv": None, "_mine": 1, "unk_token_id": 0}) == []


def test_keys_of_positions_that_nobody_reads_have_their_path() -> None:
    """As DeepSeek-R1-0528-Qwen3-8B has one."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "attn_factor": 0.88, "original_max_position_embeddings": 32768}
    assert unknown_keys(PUBLIC["Qwen3-30B-A3B"] | {"rope_scaling": yarn}) == ["rope_scaling.attn_factor"]


_NEEDED: dict[str, dict[str, Any]] = {
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 1024, "mscale": 1.0, "mscale_all_dim": 2.0},
    "llama3": LLAMA3 | {"original_max_position_embeddings": 1024},
    "longrope": {
        "short_factor": [1.0] * 32,
        "long_factor": [2.0] * 32,
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
}
_OTHER: dict[str, Any] = {
    "factor": 7.0,
    "original_max_position_embeddings": 2048,
    "attention_factor": 0.3,
    "beta_fast": 2.0,
    "beta_slow": 0.1,
    "mscale": 3.0,
    "mscale_all_dim": 5.0,
    "truncate": False,
    "low_freq_factor": 0.5,
    "high_freq_factor": 30.0,
    "short_factor": [9.0] * 32,
    "long_factor": [8.0] * 32,
}


@pytest.mark.parametrize("kind", _NEEDED)
def test_what_a_type_reads_of_positions_is_what_changes_transformers_frequencies(kind: str) -> None:
    def turned(**changes: Any) -> object:
        section = {**_NEEDED[kind], **changes, "rope_type": kind, "rope_theta": 10000.0}
        config = LlamaConfig(
            hidden_size=64, num_attention_heads=1, max_position_embeddings=4096, rope_parameters=section
        )
        found = [ROPE_INIT_FUNCTIONS[kind](config, seq_len=length) for length in (512, 8192)]
        return [(frequencies.tolist(), factor) for frequencies, factor in found]

    reads = {key for key, value in _OTHER.items() if turned(**{key: value}) != turned()}
    unread = unread_rope_keys({"rope_type": kind, "rope_theta": 1.0, "partial_rotary_factor": 1.0, **_OTHER})
    assert set(unread) == _OTHER.keys() - reads
    assert set(unread_rope_keys(_OTHER)) == _OTHER.keys()
    content = PUBLIC["Qwen3-30B-A3B"] | {"rope_scaling": {"rope_type": kind, **_NEEDED[kind], **_OTHER}}
    assert unknown_keys(content) == [f"rope_scaling.{key}" for key in content["rope_scaling"] if key in unread]


def test_a_section_for_each_kind_of_layers() -> None:
    """As transformers writes it, with two keys that say nothing where all layers are of one kind."""
    sections = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6, "beta_fast": 32.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    content = PUBLIC["gemma-3-1b-it"] | {"rope_parameters": sections}
    assert refusals(content) == []
    assert refusals(content | {"rope_parameters": {**sections, "rope_type": "default", "rope_theta": None}}) == []
    assert unknown_keys(content) == ["rope_parameters.full_attention.beta_fast"]


def test_an_older_name_of_the_type_comes_with_the_newer() -> None:
    (refusal,) = refusals(PUBLIC["gemma-3-1b-it"] | {"rope_scaling": {"type": "linear", "factor": 8.0}})
    assert refusal.endswith("Allowed: an object with a rope_type, and no type. Rename type to rope_type.")


def test_layers_with_a_window_need_one() -> None:
    (refusal,) = refusals(PUBLIC["gemma-3-1b-it"] | {"sliding_window": None})
    assert refusal.startswith("sliding_window null of config.json is not taken without layer_types")
    for given in ({"sliding_window_pattern": 1}, {"layer_types": ["full_attention"] * 26}):
        assert refusals(PUBLIC["gemma-3-1b-it"] | {"sliding_window": None} | given) == []


def test_a_family_that_is_not_taken_has_no_keys_without_effect() -> None:
    assert unknown_keys({"model_type": "olmo2", "vocab_size": 4, "mine": 1}) == []


def test_norms_that_a_family_always_has() -> None:
    """Qwen3-Coder's files name them."""
    assert refusals(PUBLIC["Qwen3-30B-A3B"] | {"use_qk_norm": True, "qkv_bias": False}) == []


@pytest.mark.parametrize(
    "given", [{"rope_theta": None}, {"rope_scaling": {"rope_type": "default", "rope_theta": None}}]
)
def test_a_base_of_positions_is_a_number(given: dict[str, object]) -> None:
    (refusal,) = refusals(PUBLIC["Llama-3.1-8B"] | {"rope_scaling": None} | given)
    assert refusal.startswith("rope_theta null of config.json is not taken.")


def test_what_needs_torch_layers() -> None:
    llama, qwen = PUBLIC["Llama-3.1-8B"], PUBLIC["Qwen2.5-7B"]
    assert needs_torch_layers(llama | {"attention_bias": True}) == "attention_bias true"
    assert needs_torch_layers(llama | {"mlp_bias": True}) == "mlp_bias true"
    assert needs_torch_layers(llama) is None
    assert needs_torch_layers(qwen) is None
    assert needs_torch_layers(PUBLIC["GLM-4.5-Air"]) is None
    assert needs_torch_layers(PUBLIC["gemma-3-1b-it"]) == "model_type gemma3_text"
    assert needs_torch_layers(PUBLIC["DeepSeek-V3"] | {"q_lora_rank": None}) == "q_lora_rank null"
    assert needs_torch_layers(PUBLIC["DeepSeek-V3"]) is None


WINDOWS: list[tuple[str, dict[str, Any]]] = [
    *(("mistral", given) for given in ({}, {"sliding_window": None}, {"sliding_window": 512})),
    *(
        (family, given)
        for family in ("qwen2", "qwen3")
        for given in (
            {},
            {"use_sliding_window": False, "sliding_window": 64},
            {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 4},
            {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 3},
            {"use_sliding_window": True, "sliding_window": 64},
            {"use_sliding_window": True, "sliding_window": 64, "layer_types": ["full_attention"] * 4},
            {"use_sliding_window": True, "sliding_window": 64, "layer_types": ["sliding_attention"] * 4},
        )
    ),
    ("qwen3_moe", {}),
    ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 64}),
    ("qwen3_moe", {"use_sliding_window": False, "sliding_window": 64}),
    *((family, {}) for family in ("llama", "deepseek_v3", "gemma", "glm4_moe")),
    *(
        ("gemma3_text", given)
        for given in (
            {},
            {"sliding_window": 64, "sliding_window_pattern": 2},
            {"sliding_window": 64, "sliding_window_pattern": 1},
            {"sliding_window": 64, "layer_types": ["full_attention"] * 4},
            {"sliding_window": 64, "layer_types": ["sliding_attention"] * 4},
        )
    ),
]


@pytest.mark.parametrize(("family", "given"), WINDOWS)
def test_windows_are_those_of_transformers(family: str, given: dict[str, Any]) -> None:
    content = {"model_type": family, "num_hidden_layers": 4, "num_attention_heads": 4} | given
    config = CONFIG_MAPPING[family](**{key: value for key, value in content.items() if key != "model_type"})
    layers = getattr(config, "layer_types", None)
    has_windows = getattr(config, "sliding_window", None) is not None and (
        layers is None or "sliding_attention" in layers
    )
    assert windows_or_sinks(content) == ("sliding windows" if has_windows else None)
    kinds = layers or ["sliding_attention" if has_windows else "full_attention"] * 4
    assert layer_windows(content, 4) == tuple(config.sliding_window if kind[0] == "s" else 0 for kind in kinds)


def test_windows_of_gpt_oss_are_in_every_other_layer() -> None:
    config = CONFIG_MAPPING["gpt_oss"](num_hidden_layers=4)
    windows = tuple(config.sliding_window if kind == "sliding_attention" else 0 for kind in config.layer_types)
    assert layer_windows({"model_type": "gpt_oss", "num_hidden_layers": 4}, 4) == windows == (128, 0, 128, 0)


@pytest.mark.parametrize("model_type", [None, 1.5, ["llama"], {"name": "llama"}])
def test_a_model_type_that_is_no_text_has_no_known_keys(model_type: object) -> None:
    assert unknown_keys({"model_type": model_type, "hidden_size": 64}) == []


def test_sinks_are_gpt_osss() -> None:
    assert windows_or_sinks({"model_type": "gpt_oss", "num_hidden_layers": 4}) == "attention sinks"


@pytest.mark.parametrize("value", ["x", None, [], {}])
@pytest.mark.parametrize("key", ["max_window_layers", "num_hidden_layers", "layer_types"])
def test_windows_of_a_broken_file_are_no_error(key: str, value: object) -> None:
    windows_or_sinks({"model_type": "qwen2", "use_sliding_window": True, key: value})
