"""Rows written one after another into one row, and back.

The model sees one row of all tokens; losses see the rows as they were. What the model says about tokens comes back by
`unpack`, which leaves out each sequence's first token: nothing in its own sequence predicts it, and in the pack the end
of the sequence before would.
"""

from dataclasses import dataclass

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
    is_learnable: Tensor
    """[width] bool: a token of a row, and not its first."""

    @classmethod
    def of_rows(cls, input_lengths: Tensor, row_width: int, width: int) -> "Packing":
        """Pack rows of `input_lengths` [B] real tokens on the left, `row_width` wide each."""
        lengths = [int(length) for length in input_lengths]
        missing = width - sum(lengths)
        assert missing >= 0, "the pack is too small"
        places = [torch.arange(length) + row * row_width for row, length in enumerate(lengths)]
        sources = torch.cat([*places, torch.zeros(missing, dtype=torch.int64)])
        is_learnable = torch.cat([torch.arange(length) > 0 for length in lengths] + [torch.zeros(missing).bool()])
        device = input_lengths.device
        everything = (*lengths, missing) if missing else tuple(lengths)
        return cls(everything, (len(lengths), row_width), sources.to(device), is_learnable.to(device))

    def pack(self, values: Tensor) -> Tensor:
        """[B, S, ...] to [1, width, ...]."""
        return values.flatten(0, 1)[self.sources][None]

    def unpack(self, values: Tensor) -> Tensor:
        """[1, width, ...] to [B, S, ...]; 0 at the rows' first tokens and behind their ends. Has a gradient."""
        num_rows, row_width = self.shape
        empty = values.new_zeros(num_rows * row_width, *values.shape[2:])
        filled = empty.index_copy(0, self.sources[self.is_learnable], values[0, self.is_learnable])
        return filled.view(num_rows, row_width, *values.shape[2:])

    def position_ids(self) -> Tensor:
        """[1, width]: positions count from 0 in each sequence."""
        return torch.cat([torch.arange(length) for length in self.lengths])[None].to(self.sources.device)
