"""What stands behind the model's last layer, for a head that makes no logits: hidden states and the output weight.

An output layer with an adapter is Bridge's wrapper of both. Its own `weight` is merged, a copy of the vocabulary whose
gradient is as large; the head takes the parts.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from nemo_rl_offload.megatron.step.fused_linear import Head, LowRank


@dataclass(frozen=True)
class HiddenStates:
    """What the model's last stage returns in place of logits."""

    hidden: Tensor
    """[S, B, H], of this rank's part of the sequence."""
    weight: Tensor
    """[V, H], this rank's part of the vocabulary."""
    is_split: bool
    """Whether tensor-parallel ranks hold different tokens (sequence parallelism)."""
    adapter: Any = None
    """Bridge's, of the output layer; None where there is none, or it is off."""

    @property
    def device(self) -> torch.device:
        """Which Megatron's schedules ask an output for, where a model has losses of its own."""
        return self.hidden.device

    def whole(self) -> Tensor:
        """Hidden states [B, S, H] of all tokens of this context-parallel rank's part, on each tensor-parallel rank.

        Each uses them for its part of the vocabulary, so the backward pass sums the gradients of all.
        """
        group = parallel_state.get_tensor_model_parallel_group()
        if self.is_split:
            whole_SBH = gather_from_sequence_parallel_region(self.hidden, group=group)
        else:
            whole_SBH = copy_to_tensor_model_parallel_region(self.hidden, group=group)
        return whole_SBH.transpose(0, 1)  # type: ignore[no-any-return]

    def low_rank(self, hidden_NH: Tensor) -> LowRank | None:
        """What the adapter makes of hidden states that are `whole`.

        Ranks share the rows of its first matrix. Each needs all of them for its part of the vocabulary, so the
        backward pass sums their gradients and gives each rank its own.
        """
        if self.adapter is None:
            return None
        inputs_RH = gather_from_sequence_parallel_region(self.adapter.linear_in.weight, group=self.adapter.tp_group)
        scale = self.adapter.alpha / self.adapter.dim
        return LowRank(F.linear(hidden_NH, inputs_RH) * scale, self.adapter.linear_out.weight)


def hand_on(output_layer: Any, hidden_SBH: Tensor, weight_VH: Tensor | None) -> HiddenStates:
    """What stands in place of an output layer's logits; its own weight, unless another one is given."""
    layer, adapter = getattr(output_layer, "to_wrap", output_layer), None
    if layer is not output_layer and output_layer._adapter_enabled:
        adapter = output_layer.adapter
    return HiddenStates(hidden_SBH, layer.weight if weight_VH is None else weight_VH, layer.sequence_parallel, adapter)


def local_head(weight_VH: Tensor, temperature: float, vocab_size: int, chunk_tokens: int | None) -> Head:
    """How this rank computes its part of the vocabulary, of which `weight_VH` is the output weight."""
    group, num_rows = parallel_state.get_tensor_model_parallel_group(), weight_VH.shape[0]
    first = group.rank() * num_rows
    return Head(
        scale=1 / temperature,
        num_local=min(max(vocab_size - first, 0), num_rows),
        first=first,
        group=group if group.size() > 1 else None,
        chunk_tokens=chunk_tokens,
        by_kernel=weight_VH.is_cuda,
    )
