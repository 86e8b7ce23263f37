"""Gemma 3's parts that Megatron's layers do not have, put into built layers of plain torch.

- The output of attention, and that of the MLP, is normed before it is added. Megatron adds in a function of its own
  (`self_attn_bda`, `mlp_bda`); a module with a norm takes its place. Megatron-Bridge has these norms inside the linear
  before them, where an adapter's part would be added behind the norm.
- Layers with a sliding window turn positions by frequencies of their own. Bridge's table of positions holds both.
- Embeddings are multiplied by a number that is rounded like the weights, as transformers rounds it.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor, nn

from nemo_rl_offload.adapters.megatron_core.interface import offload_region
from nemo_rl_offload.megatron.layers.norms import TorchNorm


class NormedBiasDropoutAdd(nn.Module):
    """Megatron's `get_bias_dropout_add` of normed outputs; the norm is a region named like that of its half's input."""

    def __init__(self, config: TransformerConfig, region: str) -> None:
        super().__init__()
        self.config, self._region = config, region
        self.norm = TorchNorm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, training: bool, fused: bool) -> Callable[[tuple[Tensor, None], Tensor, float], Tensor]:
        add = get_bias_dropout_add(training, fused)

        def normed_add(output_and_bias: tuple[Tensor, None], residual: Tensor, dropout: float) -> Tensor:
            """[sequence, batch, hidden] in and out."""
            output, bias = output_and_bias
            assert bias is None, "no such model has one"
            region = offload_region(self.config, output, self._region, self.training)
            with region as x:
                normed = self.norm(x)
            return add((region.group_offload(normed), None), residual, dropout)  # type: ignore[no-any-return]

        return normed_add


class TwoRotationsAttention(SelfAttention):  # type: ignore[misc]
    """Takes its own of the two tables of positions: [local, global] of layers with a window and without."""

    def forward(self, *args: Any, rotary_pos_emb: Tensor, **kwargs: Any) -> Any:
        """`rotary_pos_emb` [2, sequence, 1, 1, head dim]."""
        config = self.config
        is_local = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, self.layer_number)
        return super().forward(*args, rotary_pos_emb=rotary_pos_emb[0 if is_local else 1], **kwargs)


class ScaledEmbedding(LanguageModelEmbedding):  # type: ignore[misc]
    """Embeddings times the square root of their width, in the weights' precision."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        scale = torch.tensor(self.config.hidden_size**0.5, dtype=self.word_embeddings.weight.dtype)
        return super().forward(*args, **kwargs) * scale  # type: ignore[no-any-return]


def make_gemma(chunks: Sequence[nn.Module]) -> None:
    """Give built chunks these parts. The norms hold nothing yet."""
    for module in [module for chunk in chunks for module in chunk.modules()]:
        if isinstance(module, TransformerLayer):
            module.self_attn_bda = NormedBiasDropoutAdd(module.config, "attn_norm")
            module.mlp_bda = NormedBiasDropoutAdd(module.config, "mlp_norm")
            # Megatron adds with `enable_grad`, by which norms would make a graph in forwards that have none.
            module.bias_dropout_add_exec_handler = nullcontext
        elif isinstance(module, SelfAttention):
            module.__class__ = TwoRotationsAttention
        elif isinstance(module, LanguageModelEmbedding):
            module.__class__ = ScaledEmbedding
