"""Shapes of public models: the part of each one's `config.json` that memory and time depend on.

A plan or a check needs no download for them. Contents are those of the models' own files on Hugging Face's hub.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_rl_offload.errors import ConfigError, nearest
from nemo_rl_offload.specs.documents import MODEL_BYTES, read_json_object
from nemo_rl_offload.specs.model_keys import overrides_of_run
from nemo_rl_offload.specs.model_shape import ModelShape, parse_model_shape, read_model_shape
from nemo_rl_offload.specs.multimodal import SECTION, TextPart, text_content, text_part


def _qwen(family: str, layers: int, hidden: int, ffn: int, heads: int, groups: int, **other: Any) -> dict[str, Any]:
    return {
        "model_type": family,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "hidden_act": "silu",
        "vocab_size": 151936,
        "tie_word_embeddings": False,
        **other,
    }


def _qwen_moe(layers: int, hidden: int, ffn: int, heads: int, expert_ffn: int) -> dict[str, Any]:
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": expert_ffn}
    dense = {"decoder_sparse_step": 1, "mlp_only_layers": []}
    return _qwen("qwen3_moe", layers, hidden, ffn, heads, 4, head_dim=128, **experts, **dense)


def _nemotron(pattern: str, hidden: int, ffn: int, heads: int, groups: int, **other: Any) -> dict[str, Any]:
    return {
        "model_type": "nemotron_h",
        "hybrid_override_pattern": pattern,
        "num_hidden_layers": len(pattern),
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": 128,
        "ssm_state_size": 128,
        "n_groups": 8,
        "mlp_hidden_act": "relu2",
        "vocab_size": 131072,
        "tie_word_embeddings": False,
        **other,
    }


def _gemma3(layers: int, hidden: int, ffn: int, heads: int, groups: int, **other: Any) -> dict[str, Any]:
    """With images."""
    return {
        "model_type": "gemma3",
        "text_config": {
            "model_type": "gemma3_text",
            "num_hidden_layers": layers,
            "hidden_size": hidden,
            "intermediate_size": ffn,
            "num_attention_heads": heads,
            "num_key_value_heads": groups,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
            **other,
        },
    }


def _qwen3_5_moe(
    layers: int, hidden: int, heads: int, expert_ffn: int, experts: int, chosen: int, value_heads: int
) -> dict[str, Any]:
    """With images, and a layer that predicts a further token."""
    return {
        "model_type": "qwen3_5_moe",
        "text_config": {
            "model_type": "qwen3_5_moe_text",
            "num_hidden_layers": layers,
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_key_value_heads": 2,
            "linear_num_value_heads": value_heads,
            "moe_intermediate_size": expert_ffn,
            "shared_expert_intermediate_size": expert_ffn,
            "num_experts": experts,
            "num_experts_per_tok": chosen,
            "mtp_num_hidden_layers": 1,
        },
    }


def _llama(layers: int, hidden: int, ffn: int, heads: int) -> dict[str, Any]:
    return _qwen("llama", layers, hidden, ffn, heads, 8, vocab_size=128256)


CATALOGUE: Mapping[str, Mapping[str, Any]] = {
    "Qwen/Qwen2.5-1.5B": _qwen("qwen2", 28, 1536, 8960, 12, 2, tie_word_embeddings=True),
    "Qwen/Qwen2.5-7B": _qwen("qwen2", 28, 3584, 18944, 28, 4, vocab_size=152064),
    "Qwen/Qwen2.5-32B": _qwen("qwen2", 64, 5120, 27648, 40, 8, vocab_size=152064),
    "Qwen/Qwen3-8B": _qwen("qwen3", 36, 4096, 12288, 32, 8, head_dim=128),
    "Qwen/Qwen3-30B-A3B": _qwen_moe(48, 2048, 6144, 32, 768),
    "Qwen/Qwen3-235B-A22B": _qwen_moe(94, 4096, 12288, 64, 1536),
    "meta-llama/Llama-3.1-8B": _llama(32, 4096, 14336, 32),
    "meta-llama/Llama-3.1-70B": _llama(80, 8192, 28672, 64),
    "deepseek-ai/DeepSeek-V3": {
        "model_type": "deepseek_v3",
        "num_hidden_layers": 61,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": 1,
        "hidden_act": "silu",
        "vocab_size": 129280,
        "tie_word_embeddings": False,
    },
    "openai/gpt-oss-120b": {
        "model_type": "gpt_oss",
        "num_hidden_layers": 36,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "attention_bias": True,
        "hidden_act": "silu",
        "vocab_size": 201088,
        "tie_word_embeddings": False,
    },
}
"""Hub name of the base model -> contents of its config.json."""

_TIED = {"tie_word_embeddings": True}
_FURTHER: Mapping[str, Mapping[str, Any]] = {
    "Qwen/Qwen2.5-0.5B": _qwen("qwen2", 24, 896, 4864, 14, 2, **_TIED),
    "Qwen/Qwen2.5-3B": _qwen("qwen2", 36, 2048, 11008, 16, 2, **_TIED),
    "Qwen/Qwen2.5-14B": _qwen("qwen2", 48, 5120, 13824, 40, 8, vocab_size=152064),
    "Qwen/Qwen2.5-Math-1.5B": _qwen("qwen2", 28, 1536, 8960, 12, 2, **_TIED),
    "Qwen/Qwen2.5-Math-7B": _qwen("qwen2", 28, 3584, 18944, 28, 4, vocab_size=152064),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": _qwen("qwen2", 28, 1536, 8960, 12, 2),
    "Qwen/Qwen3-0.6B": _qwen("qwen3", 28, 1024, 3072, 16, 8, head_dim=128, **_TIED),
    "Qwen/Qwen3-1.7B": _qwen("qwen3", 28, 2048, 6144, 16, 8, head_dim=128, **_TIED),
    "Qwen/Qwen3-4B": _qwen("qwen3", 36, 2560, 9728, 32, 8, head_dim=128, **_TIED),
    "Qwen/Qwen3-14B": _qwen("qwen3", 40, 5120, 17408, 40, 8, head_dim=128),
    "Qwen/Qwen3-32B": _qwen("qwen3", 64, 5120, 25600, 64, 8, head_dim=128),
    "meta-llama/Llama-3.2-1B": {**_llama(16, 2048, 8192, 32), **_TIED},
    "meta-llama/Llama-3.2-3B": {**_llama(28, 3072, 8192, 24), **_TIED},
    "meta-llama/Llama-3.3-70B": _llama(80, 8192, 28672, 64),
    "mistralai/Mistral-7B-v0.3": _qwen("mistral", 32, 4096, 14336, 32, 8, vocab_size=32768, sliding_window=None),
    "HuggingFaceTB/SmolLM2-135M": _qwen("llama", 30, 576, 1536, 9, 3, vocab_size=49152, **_TIED),
    "HuggingFaceTB/SmolLM2-360M": _qwen("llama", 32, 960, 2560, 15, 5, vocab_size=49152, **_TIED),
    "HuggingFaceTB/SmolLM2-1.7B": _qwen("llama", 24, 2048, 8192, 32, 32, vocab_size=49152, **_TIED),
    "openai/gpt-oss-20b": {
        **CATALOGUE["openai/gpt-oss-120b"],
        "num_hidden_layers": 24,
        "num_local_experts": 32,
    },
    "google/gemma-3-1b": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 26,
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "max_position_embeddings": 32768,
        "rope_local_base_freq": 10000,
        "rope_theta": 1000000,
        "rope_scaling": None,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "vocab_size": 262144,
    },
    "google/gemma-3-4b": _gemma3(34, 2560, 10240, 8, 4),
    "google/gemma-3-12b": _gemma3(48, 3840, 15360, 16, 8),
    "google/gemma-3-27b": _gemma3(62, 5376, 21504, 32, 16, head_dim=128, query_pre_attn_scalar=168),
    "Qwen/Qwen3.5-35B-A3B": _qwen3_5_moe(40, 2048, 16, 512, 256, 8, 32),
    "Qwen/Qwen3.5-397B-A17B": _qwen3_5_moe(60, 4096, 32, 1024, 512, 10, 64),
    "allenai/Llama-3.1-Tulu-3-8B-SFT": {**_llama(32, 4096, 14336, 32), "vocab_size": 128264},
    "nvidia/NVIDIA-Nemotron-Nano-9B-v2": _nemotron(
        "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
        *(4480, 15680, 40, 8),
        mamba_num_heads=128,
        mamba_head_dim=80,
    ),
    "nvidia/NVIDIA-Nemotron-Nano-12B-v2": _nemotron(
        "M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M-",
        *(5120, 20480, 40, 8),
        mamba_num_heads=128,
        mamba_head_dim=80,
    ),
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B": _nemotron(
        "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        *(2688, 1856, 32, 2),
        mamba_num_heads=64,
        mamba_head_dim=64,
        n_routed_experts=128,
        n_shared_experts=1,
        num_experts_per_tok=6,
        moe_intermediate_size=1856,
        moe_shared_expert_intermediate_size=3712,
        routed_scaling_factor=2.5,
    ),
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B": _nemotron(
        "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME",
        *(4096, 2688, 32, 2),
        mamba_num_heads=128,
        mamba_head_dim=64,
        n_routed_experts=512,
        n_shared_experts=1,
        num_experts_per_tok=22,
        moe_intermediate_size=2688,
        moe_latent_size=1024,
        moe_shared_expert_intermediate_size=5376,
        routed_scaling_factor=5.0,
        num_nextn_predict_layers=1,
        mtp_hybrid_override_pattern="*E",
    ),
    "moonshotai/Moonlight-16B-A3B": {
        **CATALOGUE["deepseek-ai/DeepSeek-V3"],
        "num_hidden_layers": 27,
        "hidden_size": 2048,
        "intermediate_size": 11264,
        "moe_intermediate_size": 1408,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 0,
        "vocab_size": 163840,
    },
    "zai-org/GLM-4.7-Flash": {
        "model_type": "glm4_moe_lite",
        "num_hidden_layers": 47,
        "num_nextn_predict_layers": 1,
        "hidden_size": 2048,
        "intermediate_size": 10240,
        "moe_intermediate_size": 1536,
        "num_attention_heads": 20,
        "num_key_value_heads": 20,
        "q_lora_rank": 768,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
        "first_k_dense_replace": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.8,
        "topk_method": "noaux_tc",
        "hidden_act": "silu",
        "max_position_embeddings": 202752,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000,
        "tie_word_embeddings": False,
        "vocab_size": 154880,
    },
}
"""Models that a check knows besides."""
_OTHER_FAMILIES = {
    r"nvidia/.*nemotron-(3|nano)": "nemotron_h",
    r"google/gemma-4": "gemma4",
    r"google/gemma-3n": "gemma3n",
    r"google/gemma-2": "gemma2",
    r"qwen/qwen3-next": "qwen3_next",
    r"zai-org/glm-5": "glm_moe_dsa",
    r"zai-org/glm-4\.[567]": "glm4_moe",
    r"qwen/qwen[\d.]+-vl": "qwen_vl",
    r"qwen/qwen2\.5-omni": "qwen2_5_omni",
    r"qwen/qwen3-omni": "qwen3_omni_moe",
    r"minimaxai/minimax-m2": "minimax_m2",
    r"huggingfacetb/smolvlm": "smolvlm",
}
"""How names of models begin whose families are not trained here, and their `model_type`."""

# Further training of the same shape.
_VARIANT = re.compile(r"-(Instruct|Base|Chat|Thinking|BF16|it|pt|\d{4})$", re.IGNORECASE)
_SAME_SHAPE = {
    "deepseek-ai/DeepSeek-R1": "deepseek-ai/DeepSeek-V3",
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": "meta-llama/Llama-3.1-8B",
    "deepseek-ai/DeepSeek-R1-Distill-Llama-70B": "meta-llama/Llama-3.1-70B",
    "mistralai/Mistral-7B-Instruct-v0.3": "mistralai/Mistral-7B-v0.3",
}
_MODELS: Mapping[str, Mapping[str, Any]] = {
    **CATALOGUE,
    **_FURTHER,
    **{name: {**CATALOGUE, **_FURTHER}[same] for name, same in _SAME_SHAPE.items()},
}
"""All of them."""


def find_config(name: str) -> Mapping[str, Any] | None:
    """Return the `config.json` contents of a model by its hub name, variants such as `-Instruct` included; of a
    multimodal one those of its text part.

    None for a model that the catalogue does not have. Case does not matter.
    """
    base = name.strip("/")
    while _VARIANT.search(base):
        base = _VARIANT.sub("", base)
    base = re.sub("/Meta-Llama-", "/Llama-", base, flags=re.IGNORECASE)
    known = {key.lower(): content for key, content in _MODELS.items()}
    content = known.get(base.lower()) or known.get(name.strip("/").lower())
    return None if content is None else text_content(content)


def other_content(name: str) -> Mapping[str, Any] | None:
    """Return what is known of the `config.json` of a public model that the catalogue does not have, by its hub name.

    That is its `model_type`; None for any other.
    """
    kinds = (kind for begin, kind in _OTHER_FAMILIES.items() if re.match(begin, name.lower()))
    return next(({"model_type": kind} for kind in kinds), None)


def read_config_file(path: Path) -> Mapping[str, Any]:
    """Return what a `config.json` holds, that of a multimodal model as its text part's.

    Raises ConfigError when it cannot be read.
    """
    content = _read(path)
    try:
        return text_content(content)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def read_text_part(path: Path) -> TextPart | None:
    """Return what is trained of the multimodal model that a `config.json` describes; None for a text model.

    Raises ConfigError when it cannot be read.
    """
    return text_part(_read(path))


def key_in_file(path: Path, key: str) -> str:
    """Where a key of the text model stands in a `config.json`: below `text_config` in a multimodal model's."""
    return key if read_text_part(path) is None else f"{SECTION}.{key}"


def _read(path: Path) -> Mapping[str, Any]:
    try:
        return read_json_object(path, MODEL_BYTES)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error


def load_model_shape(name: str, folder: Path | None, mtp_num_layers: int | None = None) -> ModelShape:
    """Return the shape of a model: from `config.json` in `folder` where there is one, else from the catalogue.

    Without layers that predict further tokens where a run wants 0 of them.

    Raises ConfigError when neither has it, or the file cannot be read.
    """
    path = None if folder is None else folder / "config.json"
    file = path if path is not None and path.is_file() else None
    found = find_config(name) if file is None else read_config_file(file)
    if found is None:
        planned = [each for each, content in _MODELS.items() if not parse_model_shape(text_content(content)).problems]
        raise ConfigError(
            f"'{name}' is neither a local folder with a config.json nor in the catalogue.{nearest(name, planned)} "
            f"Give a folder, or one of {', '.join(sorted(planned))}."
        )
    found = {**found, **overrides_of_run(found, {}, mtp_num_layers)}
    return read_model_shape(found, name if file is None else str(file))
