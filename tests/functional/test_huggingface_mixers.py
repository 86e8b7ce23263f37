"""Megatron's names in layers of other kinds: Mamba-2, gated delta nets, sinks and windows, vision towers."""

from typing import Any

import pytest
import torch
import transformers
from huggingface_models import DEVICE, all_came_back, identical, make_batch, offload
from torch import Tensor, nn

pytestmark = pytest.mark.slow

SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
DELTA = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 8}
MIXER = ("attn_norm", "qkv_linear", "core_attn", "attn_proj")
MLP = ("mlp_norm", "mlp_fc1", "mlp_act")
MOE = ("mlp_norm", "expert_fc1", "moe_act")

# model, configuration, what it is made of, names, how many layers mix tokens
MODELS: dict[str, tuple[str, str, dict[str, Any], tuple[str, ...], int]] = {
    "qwen3_next": (
        *("Qwen3NextForCausalLM", "Qwen3NextConfig"),
        SHAPE | DELTA | EXPERTS | {"shared_expert_intermediate_size": 32},
        (*MIXER, *MOE),
        2,
    ),
    "qwen3_5": ("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", SHAPE | DELTA, (*MIXER, *MLP), 2),
    "nemotron_h": (
        *("NemotronHForCausalLM", "NemotronHConfig"),
        SHAPE
        | {
            "num_hidden_layers": 3,
            "hybrid_override_pattern": "M*-",
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "n_groups": 1,
            "chunk_size": 8,
            "head_dim": 16,
        },
        (*MIXER, *MLP),
        2,
    ),
    "mamba2": (
        *("Mamba2ForCausalLM", "Mamba2Config"),
        {
            "vocab_size": 97,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_heads": 8,
            "head_dim": 16,
            "state_size": 16,
            "n_groups": 1,
            "chunk_size": 8,
        },
        MIXER,
        2,
    ),
    "bamba": ("BambaForCausalLM", "BambaConfig", SHAPE | MAMBA | {"attn_layer_indices": [1]}, (*MIXER, *MLP), 2),
    "gpt_oss": (
        *("GptOssForCausalLM", "GptOssConfig"),
        SHAPE | {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5},
        (*MIXER, *MOE),
        2,
    ),
    "mistral_window": ("MistralForCausalLM", "MistralConfig", SHAPE | {"sliding_window": 5}, (*MIXER, *MLP), 2),
    "siglip": (
        *("SiglipVisionModel", "SiglipVisionConfig"),
        {
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 16,
            "patch_size": 4,
        },
        (*MIXER, *MLP),
        2,
    ),
    "clip": (
        *("CLIPVisionModel", "CLIPVisionConfig"),
        {
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 16,
            "patch_size": 4,
        },
        (*MIXER, *MLP),
        2,
    ),
}


def steps(model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    results = []
    for length in (11, 6):
        if "Vision" in type(model).__name__:
            pixels = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(length)).to(DEVICE)
            loss = model(pixel_values=pixels).last_hidden_state.square().mean()
        else:
            loss = model(**make_batch(length), use_cache=False).loss
        loss.backward()
        results.append(loss.detach())
    return [*results, *(each.grad.clone() for each in model.parameters() if each.grad is not None)]


@pytest.mark.usefixtures("no_clock")
@pytest.mark.parametrize("kind", MODELS)
def test_each_name_alone_and_all_together(kind: str) -> None:
    model_class, config_class, shape, names, num_mixers = MODELS[kind]
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(**shape)).to(DEVICE).train()
    expected = steps(model)
    for listed in (*([name] for name in names), list(names)):
        with offload(model, listed) as active:
            assert identical(steps(model), expected)
        stats = active.stats()
        assert {name for name, each in stats.per_module.items() if each.bytes_out} == set(listed)
        assert all_came_back(stats)
        assert stats.host_bytes == 0
    assert stats.per_module["core_attn"].num_groups == 2 * num_mixers
    assert stats.per_module["attn_norm"].num_groups == 2 * num_mixers
