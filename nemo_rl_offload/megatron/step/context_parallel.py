"""Sequences split over context-parallel ranks.

A sequence is cut into twice as many chunks as there are ranks, of which a rank takes two (`context_parts`). Of rows
[B, S] that is one cut for all; in a pack each sequence has its own, and a `PackPart` says which positions a rank holds.

Inside the model everything has the length of a rank's part. Losses are not split: what they need of each token is one
number (or a few), which is gathered over the ranks, so that a loss sees whole rows whatever the layout, and each rank
computes it alike. The backward pass takes each rank's own part of the gradient. Megatron multiplies a microbatch's loss
by the number of ranks and divides the sum of their gradients by it.

The price: a rank's last logits of a chunk predict a token that another rank has, so tokens are split after they are
shifted, not before; and the losses' own arithmetic is repeated on every rank.
"""

from functools import cache

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor

from nemo_rl_offload.batching.context_parts import pieces_of
from nemo_rl_offload.batching.packing import PackPart


def num_ranks() -> int:
    """Ranks that share a sequence."""
    size: int = parallel_state.get_context_parallel_world_size()
    return size


def shard_for_cp(values_BS: Tensor, part: PackPart | None = None) -> Tensor:
    """This rank's positions of [B, S, ...], or of a pack [1, S, ...] its `part`; S is a multiple of twice the number of
    ranks."""
    if part is not None:
        return values_BS.index_select(1, part.positions)
    if num_ranks() == 1:
        return values_BS
    chunks = values_BS.chunk(2 * num_ranks(), dim=1)
    return torch.cat([chunks[index] for index in pieces_of(parallel_state.get_context_parallel_rank(), num_ranks())], 1)


def gather_sequence(values_SB: Tensor, *, sums_gradients: bool, part: PackPart | None = None) -> Tensor:
    """All ranks' positions, in the sequence's order or the pack's, of this rank's [S / ranks, ...]: [S, ...].

    With `sums_gradients` the ranks use the result for different things and the gradients of all are summed; without,
    they compute the same from it, and each takes its own part of its own gradient.
    """
    group = parallel_state.get_context_parallel_group()
    gathered: Tensor = gather_from_sequence_parallel_region(
        values_SB.contiguous(), tensor_parallel_output_grad=sums_gradients, group=group
    )
    if part is not None:
        return gathered.index_select(0, part.places)
    chunks = gathered.chunk(2 * group.size())
    return torch.cat([chunks[index] for index in _places(group.size())])


@cache
def _places(num_ranks: int) -> list[int]:
    """Where each chunk of the sequence stands after the ranks' parts were put together."""
    gathered = [chunk for rank in range(num_ranks) for chunk in pieces_of(rank, num_ranks)]
    return [gathered.index(chunk) for chunk in range(2 * num_ranks)]


def shift_logits(logits_BSV: Tensor) -> Tensor:
    """The logits that predict a token of the row."""
    return logits_BSV[:, :-1] if num_ranks() == 1 else logits_BSV


def shift_targets(values_BS: Tensor, part: PackPart | None = None) -> Tensor:
    """Values of tokens [B, S, ...], of those that this rank's logits predict after `shift_logits`."""
    following = values_BS[:, 1:]
    if num_ranks() == 1:
        return following
    return shard_for_cp(F.pad(following, (0, 0) * (following.ndim - 2) + (0, 1)), part)


def gather_for_cp(values_BS: Tensor, part: PackPart | None = None) -> Tensor:
    """What was computed of this rank's shifted logits, as values of whole rows' tokens [B, S, ...]; position 0 is 0."""
    if num_ranks() > 1:
        values_SB = gather_sequence(values_BS.transpose(0, 1), sums_gradients=False, part=part)
        values_BS = values_SB.transpose(0, 1)[:, :-1]
    return F.pad(values_BS, (0, 0) * (values_BS.ndim - 2) + (1, 0))
