"""Rows written one after another into one row, and back.

The model sees one row of all tokens (a *pack*); losses see the rows as they were. `pack` and `unpack` go between the
two. `unpack` leaves out each sequence's first token: its own sequence has nothing that predicts it, and the logits
before it belong to another sequence.

All index tensors are made, and on the device, before the step begins. Made later, or read back from the device, they
would let the host wait for everything queued there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True)
class Packing:
    """Where the tokens of rows [B, S] stand in a pack of `width` positions.

    Rows come in order, each with its real tokens alone; what is left of the width holds copies of the first token, as
    a sequence of its own.
    """

    lengths: tuple[int, ...]
    """Of all sequences in the pack; they add up to its width."""
    shape: tuple[int, int]
    sources: Tensor
    """[width] int64: place of each position's token among the B x S of the rows."""
    learnable: Tensor
    """int64: positions of the rows' tokens but their first ones;"""
    learnable_sources: Tensor
    """and their places among the B x S."""
    position_ids: Tensor
    """[1, width] int64: positions count from 0 in each sequence."""
    bounds: Tensor
    """[sequences + 1] int32: where each begins, and the width."""

    @classmethod
    def of_rows(cls, lengths: Sequence[int], row_width: int, width: int, device: torch.device | str) -> "Packing":
        """Pack rows of `lengths` real tokens on the left, `row_width` wide each."""
        missing = width - sum(lengths)
        assert missing >= 0, "the pack is too small"
        places = [torch.arange(length) + row * row_width for row, length in enumerate(lengths)]
        sources = torch.cat([*places, torch.zeros(missing, dtype=torch.int64)])
        everything = (*lengths, missing) if missing else tuple(lengths)
        positions = torch.cat([torch.arange(length) for length in everything])
        learnable = positions[: width - missing].nonzero().flatten()
        bounds = torch.tensor([0, *accumulate(everything)], dtype=torch.int32)
        return cls(
            everything,
            (len(lengths), row_width),
            sources.to(device),
            learnable.to(device),
            sources[learnable].to(device),
            positions[None].to(device),
            bounds.to(device),
        )

    def pack(self, values: Tensor) -> Tensor:
        """[B, S, ...] to [1, width, ...]."""
        return values.flatten(0, 1)[self.sources][None]

    def unpack(self, values: Tensor) -> Tensor:
        """[1, width, ...] to [B, S, ...]; 0 at the rows' first tokens and behind their ends. Has a gradient."""
        num_rows, row_width = self.shape
        empty = values.new_zeros(num_rows * row_width, *values.shape[2:])
        filled = empty.index_copy(0, self.learnable_sources, values[0].index_select(0, self.learnable))
        return filled.view(num_rows, row_width, *values.shape[2:])
