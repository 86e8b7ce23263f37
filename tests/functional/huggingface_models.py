"""Tiny transformers models of each family with random weights, and steps on them; on the GPU if there is one."""

from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from nemo_rl_offload import offload_activations
from nemo_rl_offload.adapters.torch_modules import ActivationOffload
from nemo_rl_offload.offload import OffloadStats

VOCABULARY_SIZE = 97
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

_SHAPE = {
    "vocab_size": VOCABULARY_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
    "pad_token_id": 0,
}
_HEAD = {"head_dim": 16}
_EXPERTS = {
    **_HEAD,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "mlp_only_layers": [0],
    "decoder_sparse_step": 1,
}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": 8}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", _HEAD),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", _EXPERTS),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", _HEAD),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", _HEAD),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", _HEAD),
}
DENSE_NAMES = ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "mlp_fc1", "mlp_act")
"""What every family has; qwen3_moe's first layer is dense."""


def names_of(family: str) -> list[str]:
    return [*DENSE_NAMES, *(("expert_fc1", "moe_act") if family == "qwen3_moe" else ())]


def make_model(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """In training mode, with sdpa attention unless changed."""
    config_class, model_class, shape = FAMILIES[family]
    config = getattr(transformers, config_class)(**{**_SHAPE, **shape, "attn_implementation": "sdpa", **changes})
    torch.manual_seed(0)
    return getattr(transformers, model_class)(config).to(DEVICE, dtype).train()


def make_batch(length: int, seed: int = 0, num_rows: int = 2) -> dict[str, Tensor]:
    """Random tokens; the first row ends early and is padded."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCABULARY_SIZE, (num_rows, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, length - length // 3 :] = 0
    labels = ids.masked_fill(mask == 0, -100)
    return {name: each.to(DEVICE) for name, each in (("input_ids", ids), ("attention_mask", mask), ("labels", labels))}


def gradients(model: nn.Module, batches: Sequence[dict[str, Tensor]]) -> list[Tensor]:
    """Losses of the microbatches and the gradients that they sum up to."""
    model.zero_grad()
    losses = []
    for batch in batches:
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        losses.append(loss.detach())
    return [*losses, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def identical(got: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return len(got) == len(expected) and all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def all_came_back(stats: OffloadStats) -> bool:
    """Something left, and was copied back; on a GPU, where copies take time, some may not have been let go before."""
    returned_bytes = stats.returned_bytes if DEVICE == "cuda" else 0
    return stats.bytes_out == stats.bytes_in + returned_bytes > 0


def offload(model: nn.Module, modules: Sequence[str]) -> ActivationOffload:
    return offload_activations(model, modules, host_memory_budget="64MiB", min_tensor_bytes=0)
