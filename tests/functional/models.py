"""Tiny Hugging Face models with random weights, and policies, batches and steps that train them in this process."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from nemo_rl_offload.adapters.megatron_core.interface import exclude_parameters, use_engine
from nemo_rl_offload.config.loader import PROJECT_ROOT, load_config
from nemo_rl_offload.losses.reduction import normalizers
from nemo_rl_offload.losses.registry import build_loss
from nemo_rl_offload.megatron.build.model import MegatronModel
from nemo_rl_offload.megatron.step.head import LogitsHeadFactory
from nemo_rl_offload.megatron.step.train_step import train_step
from nemo_rl_offload.offload.engine import OffloadEngine

VOCABULARY_SIZE = 260  # all tokens but those in reserve; even, for two tensor-parallel ranks
MICRO_BATCH_SIZE = 2

_SHAPE = {
    "vocab_size": VOCABULARY_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
}
_EXPERTS = {
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 2,
    "moe_intermediate_size": 32,
}
_HYBRID = {
    "hybrid_override_pattern": "MEM*-EM-",
    "head_dim": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "ssm_state_size": 8,
    "chunk_size": 64,  # transformers' plain form gives another result with several chunks
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 48,
}
_DELTA = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "full_attention_interval": 2,
    "rms_norm_eps": 1e-2,  # a first token's state is one product, which may be next to 0 and is normed
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}
_DELTA_MOE = (
    {key: value for key, value in _EXPERTS.items() if key != "norm_topk_prob"}
    | _DELTA
    | {"shared_expert_intermediate_size": 48}
)
_SINKS = {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5}
_WINDOWS = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
_GEMMA3 = {
    "head_dim": 16,
    "query_pre_attn_scalar": 24,
    "sliding_window": 5,
    "sliding_window_pattern": 2,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    },
}
_VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_OF_IMAGES = {"mm_tokens_per_image": 4, "boi_token_index": 257, "eoi_token_index": 258, "image_token_index": 259}


def _gemma3(**text: Any) -> Gemma3Config:
    return Gemma3Config(text_config=text, vision_config=_VISION, **_OF_IMAGES)


_VISION_OF_QWEN = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
}
_TOKENS_OF_QWEN = {
    "image_token_id": 260,
    "video_token_id": 261,
    "vision_start_token_id": 262,
    "vision_end_token_id": 263,
}


def _qwen3_5(**text: Any) -> Qwen3_5Config:
    return Qwen3_5Config(text_config=text, vision_config=_VISION_OF_QWEN, **_TOKENS_OF_QWEN)


def _qwen3_5_moe(**text: Any) -> Qwen3_5MoeConfig:
    return Qwen3_5MoeConfig(text_config=text, vision_config=_VISION_OF_QWEN, **_TOKENS_OF_QWEN)


FAMILIES: dict[str, tuple[Callable[..., Any], type, dict[str, Any]]] = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16}),
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM, _EXPERTS),
    "deepseek_v2": (DeepseekV2Config, DeepseekV2ForCausalLM, _LATENT),
    "deepseek_v3": (DeepseekV3Config, DeepseekV3ForCausalLM, _LATENT),
    "glm4_moe_lite": (
        Glm4MoeLiteConfig,
        Glm4MoeLiteForCausalLM,
        {key: value for key, value in _LATENT.items() if key != "first_k_dense_replace"},
    ),
    "gpt_oss": (GptOssConfig, GptOssForCausalLM, _SINKS),
    "gemma3_text": (Gemma3TextConfig, Gemma3ForCausalLM, _GEMMA3),
    "gemma3": (_gemma3, Gemma3ForConditionalGeneration, _GEMMA3),
    "qwen3_5": (_qwen3_5, Qwen3_5ForConditionalGeneration, _DELTA),
    "qwen3_5_moe": (_qwen3_5_moe, Qwen3_5MoeForConditionalGeneration, _DELTA_MOE),
    "nemotron_h": (NemotronHConfig, NemotronHForCausalLM, _HYBRID),
    "qwen3_5_text": (Qwen3_5TextConfig, Qwen3_5ForCausalLM, _DELTA),
    "qwen3_5_moe_text": (Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM, _DELTA_MOE),
    "nemotron_h_latent": (NemotronHConfig, NemotronHForCausalLM, _HYBRID | {"moe_latent_size": 24}),
    "llama_biased": (
        LlamaConfig,
        LlamaForCausalLM,
        {"attention_bias": True, "mlp_bias": True, "rope_parameters": _ROPE},
    ),
    "qwen2_windowed": (Qwen2Config, Qwen2ForCausalLM, _WINDOWS),
    "qwen3_moe_mixed": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        _EXPERTS | {"mlp_only_layers": [1], "attention_bias": True},
    ),
    "deepseek_v3_mtp": (DeepseekV3Config, DeepseekV3ForCausalLM, _LATENT | {"num_nextn_predict_layers": 1}),
    "glm4_moe_lite_mtp": (Glm4MoeLiteConfig, Glm4MoeLiteForCausalLM, _LATENT | {"num_nextn_predict_layers": 1}),
    "nemotron_h_mtp": (
        NemotronHConfig,
        NemotronHForCausalLM,
        _HYBRID | {"num_nextn_predict_layers": 1, "moe_latent_size": 24, "mtp_hybrid_override_pattern": "*E-"},
    ),
    # A vocabulary that two tensor-parallel ranks do not divide.
    "qwen2_odd": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True, "vocab_size": VOCABULARY_SIZE + 1}),
    "llama_odd": (LlamaConfig, LlamaForCausalLM, {"vocab_size": VOCABULARY_SIZE + 1}),
    "deepseek_v3_mtp_odd": (
        DeepseekV3Config,
        DeepseekV3ForCausalLM,
        _LATENT | {"num_nextn_predict_layers": 1, "vocab_size": VOCABULARY_SIZE + 1},
    ),
}


def write_model(family: str, folder: Path, **shape: Any) -> Path:
    """Write a random model with a tokenizer. No norm is 1 and no bias 0, so that a parameter left out shows.

    `shape` replaces values of the family's configuration.
    """
    config_class, model_class, changes = FAMILIES[family]
    torch.manual_seed(0)
    model = model_class(config_class(**_SHAPE | changes | shape)).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                adds_one = family.startswith(("gemma3", "qwen3_5")) and "linear_attn" not in name
                is_scale = "norm" in name and not adds_one
                parameter.copy_(torch.randn_like(parameter) * 0.3 + is_scale)
            elif "linear_attn.conv1d" in name:  # queries and keys are divided by their lengths: short ones go astray
                parameter.copy_(torch.randn_like(parameter) * 0.5)
            elif name.endswith("_bias"):
                parameter.copy_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(folder)
    if changes.get("num_nextn_predict_layers"):
        add = _add_hybrid_mtp_layer if model.config.model_type == "nemotron_h" else _add_mtp_layer
        add(folder / "model.safetensors", model.config)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(PROJECT_ROOT / "examples/models/tiny_speller" / name, folder)
    return folder


def _add_mtp_layer(file: Path, config: Any) -> None:
    """Write a layer that predicts a further token, a copy of the last one, which transformers neither has nor saves."""
    weights = load_file(file)
    last, new = (f"model.layers.{config.num_hidden_layers - 1 + offset}." for offset in (0, 1))
    weights |= {new + key.removeprefix(last): value.clone() for key, value in weights.items() if key.startswith(last)}
    for name in ("enorm", "hnorm", "shared_head.norm"):
        weights[f"{new}{name}.weight"] = 1 + 0.3 * torch.randn(config.hidden_size)
    weights[f"{new}eh_proj.weight"] = 0.1 * torch.randn(config.hidden_size, 2 * config.hidden_size)
    save_file(weights, file, metadata={"format": "pt"})


def _add_hybrid_mtp_layer(file: Path, config: Any) -> None:
    """The same of a hybrid model: a layer for each letter of its pattern, near the model's first of that kind."""
    weights, pattern = load_file(file), config.mtp_hybrid_override_pattern
    for number, letter in enumerate(pattern):
        old, new = f"backbone.layers.{config.hybrid_override_pattern.index(letter)}.", f"mtp.layers.{number}."
        for name in [name for name in weights if name.startswith(old)]:
            noise = 0.05 * torch.randn_like(weights[name])
            weights[new + name.removeprefix(old)] = weights[name] + noise
    for name, number in (("enorm", 0), ("hnorm", 0), ("final_layernorm", len(pattern) - 1)):
        weights[f"mtp.layers.{number}.{name}.weight"] = 1 + 0.3 * torch.randn(config.hidden_size)
    weights["mtp.layers.0.eh_proj.weight"] = 0.1 * torch.randn(config.hidden_size, 2 * config.hidden_size)
    save_file(weights, file, metadata={"format": "pt"})


def read_model(folder: Path, family: str) -> Any:
    """The same folder as a transformers model, float32, for evaluation."""
    return FAMILIES[family][1].from_pretrained(folder, dtype=torch.float32).eval()


def make_policy(*overrides: str) -> Any:
    """The `policy` section of the tiny exemplar without offloading, changed by overrides relative to `megatron_cfg`.

    `precision=...` and other keys of `policy` itself are written with a leading dot.
    """
    changes = ["fine_grained_activation_offloading=false", "activation_offload.host_memory_budget=64MiB", *overrides]
    paths = [f"policy{text}" if text.startswith(".") else f"policy.megatron_cfg.{text}" for text in changes]
    return load_config(PROJECT_ROOT / "examples/configs/grpo_tiny.yaml", paths)["policy"]


def offload(modules: Sequence[str]) -> tuple[str, ...]:
    """Overrides that offload these modules; none for no modules."""
    if not modules:
        return ()
    return ("fine_grained_activation_offloading=true", f"offload_modules=[{','.join(modules)}]")


def make_batch(step: int, num_samples: int = 6, multiple: int = 1) -> dict[str, Tensor]:
    """Random tokens padded on the right; lengths, and the longest of them, change with `step`.

    Lengths are rounded up to multiples of `multiple`.
    """
    generator = torch.Generator().manual_seed(step)
    width = 18 - 3 * (step % 3)
    lengths = torch.randint(4, width + 1, (num_samples,), generator=generator)
    lengths[step % num_samples] = width
    lengths, width = -(-lengths // multiple) * multiple, -(-width // multiple) * multiple
    return {
        "input_ids": torch.randint(0, VOCABULARY_SIZE, (num_samples, width), generator=generator),
        "input_lengths": lengths,
        "token_mask": (torch.arange(width) < lengths[:, None]).long(),
        "sample_mask": torch.ones(num_samples),
    }


def take_step(model: MegatronModel, step: int, num_samples: int = 6, multiple: int = 1) -> dict[str, float]:
    """One optimizer step on the batch of this step number; two samples are a microbatch."""
    batch = make_batch(step, num_samples, multiple)
    return train_step(model, batch, build_loss("nll", {}), normalizers(batch), MICRO_BATCH_SIZE, LogitsHeadFactory(1.0))


def count_step(model: MegatronModel, engine: OffloadEngine, num_microbatches: int, sequence: int) -> dict[str, int]:
    """Take a step on microbatches of full length, then close the engine; the bytes per module that it counted."""
    exclude_parameters(engine, model.modules)
    try:
        num_samples = num_microbatches * MICRO_BATCH_SIZE
        batch = {
            "input_ids": torch.randint(0, VOCABULARY_SIZE, (num_samples, sequence)),
            "input_lengths": torch.full((num_samples,), sequence),
            "token_mask": torch.ones(num_samples, sequence, dtype=torch.long),
            "sample_mask": torch.ones(num_samples),
        }
        train_step(model, batch, build_loss("nll", {}), normalizers(batch), MICRO_BATCH_SIZE, LogitsHeadFactory(1.0))
        stats = engine.stats()
        assert stats.denied_bytes == 0
        return {name: module.bytes_out for name, module in stats.per_module.items() if module.num_groups}
    finally:
        use_engine(None)
        engine.close()


def weights_of(model: MegatronModel) -> dict[str, Tensor]:
    """Copies of all parameters by name."""
    return {
        f"{index}.{name}": parameter.detach().clone()
        for index, module in enumerate(model.modules)
        for name, parameter in module.named_parameters()
    }


def same_tensors(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    """Same names and, bit for bit, the same values."""
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def make_rows(step: int, widths: Sequence[int]) -> dict[str, torch.Tensor]:
    """Two rows for each width, of which the second is a bit shorter; tokens change with the step."""
    generator = torch.Generator().manual_seed(step)
    lengths = torch.tensor([length for width in widths for length in (width, width - 3)])
    size = len(lengths), max(widths)
    return {
        "input_ids": torch.randint(0, VOCABULARY_SIZE, size, generator=generator),
        "input_lengths": lengths,
        "token_mask": (torch.arange(size[1]) < lengths[:, None]).long(),
        "sample_mask": torch.ones(len(lengths)),
    }
