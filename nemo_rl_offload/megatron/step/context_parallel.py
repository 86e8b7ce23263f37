"""Sequences split over context-parallel ranks.

A sequence is cut into twice as many chunks as there are ranks, of which a rank takes two (`context_parts`). Of rows
[B, S] that is one cut for all; in a pack each sequence has its own, and a `PackPart` says which positions a rank holds.

Inside the model everything has the length of a rank's part. Losses are not split: what they need of each token is one
number (or a few), which is gathered over the ranks, so that a loss sees whole rows whatever the layout, and each rank
computes it alike. The backward pass takes each rank's own part of the gradient. Megatron multiplies a microbatch's loss
by the number of ranks and divides the sum of their gradients by it.

The price: a rank's last logits of a chunk predict a token that another rank has, so tokens are split after they are
shifted, not before; and the losses' own arithmetic is repeated on every rank.

A recurrence needs all positions, in order, but each head's by itself: its ranks exchange positions for heads and back.
"""

from collections.abc import Sequence
from functools import cache

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import all_to_all, gather_from_sequence_parallel_region
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
    return _in_order(gathered, part)


def positions_for_heads(heads_of_ranks: Sequence[Tensor], part: PackPart | None = None) -> Tensor:
    """Given what each rank gets of this rank's positions, [S / ranks, B, ...] each and of one size, what this rank gets
    of all positions: [S, B, ...], in the sequence's order or the pack's. The gradient goes the way back."""
    received: Tensor = all_to_all(parallel_state.get_context_parallel_group(), torch.cat(list(heads_of_ranks)))
    return _in_order(received, part)


def heads_for_positions(heads_SB: Tensor, part: PackPart | None = None) -> Sequence[Tensor]:
    """The way back: of this rank's heads at all positions [S, B, ...], those of each rank at this rank's positions,
    [S / ranks, B, ...] each."""
    received: Tensor = all_to_all(parallel_state.get_context_parallel_group(), _by_ranks(heads_SB, part))
    return received.chunk(num_ranks())


def _in_order(gathered: Tensor, part: PackPart | None) -> Tensor:
    """The ranks' positions, one rank behind another [S, ...], in the sequence's order or the pack's."""
    if part is not None:
        return gathered.index_select(0, part.places)
    order, chunks = _chunks_by_ranks(num_ranks()), gathered.chunk(2 * num_ranks())
    return torch.cat([chunks[order.index(chunk)] for chunk in range(len(order))])


def _by_ranks(values_SB: Tensor, part: PackPart | None) -> Tensor:
    """The reverse of `_in_order`."""
    if part is not None:
        return torch.empty_like(values_SB).index_copy(0, part.places, values_SB)
    chunks = values_SB.chunk(2 * num_ranks())
    return torch.cat([chunks[chunk] for chunk in _chunks_by_ranks(num_ranks())])


@cache
def _chunks_by_ranks(num_ranks: int) -> list[int]:
    """The chunks of a sequence as the ranks' parts have them, one behind another."""
    return [chunk for rank in range(num_ranks) for chunk in pieces_of(rank, num_ranks)]


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
