"""Rows written one after another into one row, and back.

The model sees one row of all tokens (a *pack*); losses see the rows as they were. `pack` and `unpack` go between the
two. `unpack` leaves out each sequence's first token: its own sequence has nothing that predicts it, and the logits
before it belong to another sequence.

With context parallelism each sequence is filled up to a multiple of what cuts it, and a rank holds its pieces of each
(`context_parts`). What fills a sequence up stands behind its end, where causal attention keeps it from every real
token, so nothing else has to know of it.

All index tensors are made, and on the device, before the step begins. Made later, or read back from the device, they
would let the host wait for everything queued there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from nemo_rl_offload.batching.context_parts import gathered_places, own_positions


@dataclass(frozen=True)
class PackPart:
    """What one of several context-parallel ranks holds of a pack."""

    positions: Tensor
    """[width / ranks] int64: which positions of the pack, in the rank's order."""
    places: Tensor
    """[width] int64: where each position stands once the parts of all ranks are put one behind another."""

    @classmethod
    def of_pack(cls, lengths: Sequence[int], rank: int, num_ranks: int, device: torch.device | str) -> "PackPart":
        """The part of a rank, of sequences of `lengths`."""
        positions = torch.tensor(own_positions(lengths, rank, num_ranks))
        return cls(positions.to(device), torch.tensor(gathered_places(lengths, num_ranks)).to(device))


@dataclass(frozen=True)
class Packing:
    """Where the tokens of rows [B, S] stand in a pack of `width` positions.

    Rows come in order, each with its real tokens, filled up with copies of its first token where sequences are; what is
    left of the width holds copies of the first token of all, as a sequence of its own.
    """

    lengths: tuple[int, ...]
    """Of all sequences in the pack, filled up; they add up to its width."""
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
    part: PackPart | None = None
    """Of this rank; None: it holds the whole pack."""

    @classmethod
    def of_rows(
        cls,
        lengths: Sequence[int],
        row_width: int,
        width: int,
        device: torch.device | str,
        *,
        multiple: int = 1,
        rank: int = 0,
        num_ranks: int = 1,
    ) -> "Packing":
        """Pack rows of `lengths` real tokens on the left, `row_width` wide each.

        Sequences are filled up to multiples of `multiple`, and divided among `num_ranks` context-parallel ranks.
        """
        filled = [-(-length // multiple) * multiple for length in lengths]
        missing = width - sum(filled)
        assert missing >= 0, "the pack is too small"
        everything = (*filled, missing) if missing else tuple(filled)
        num_real = [*lengths, 0][: len(everything)]
        starts = [*range(0, len(lengths) * row_width, row_width), 0][: len(everything)]
        begins = np.cumsum([0, *everything[:-1]])
        # Torch's threads take milliseconds to meet, with the device idle.
        begin, start, num = (np.repeat(each, everything) for each in (begins, starts, num_real))
        positions = np.arange(width) - begin
        is_real = positions < num
        sources = start + positions * is_real
        learnable = np.flatnonzero(is_real & (positions > 0))
        bounds = torch.tensor([0, *accumulate(everything)], dtype=torch.int32)
        return cls(
            everything,
            (len(lengths), row_width),
            torch.from_numpy(sources).to(device),
            torch.from_numpy(learnable).to(device),
            torch.from_numpy(sources[learnable]).to(device),
            torch.from_numpy(positions[None]).to(device),
            bounds.to(device),
            PackPart.of_pack(everything, rank, num_ranks, device) if num_ranks > 1 else None,
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
