"""What stands behind the model's last layer, for a head that makes no logits: hidden states and the output weight."""

from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from nemo_rl_offload.megatron.step.fused_linear import Head


@dataclass(frozen=True)
class HiddenStates:
    """What the model's last stage returns in place of logits."""

    hidden: Tensor
    """[S, B, H], of this rank's part of the sequence."""
    weight: Tensor
    """[V, H], this rank's part of the vocabulary."""
    is_split: bool
    """Whether tensor-parallel ranks hold different tokens (sequence parallelism)."""

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
