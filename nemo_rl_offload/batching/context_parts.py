"""Which tokens of a pack a context-parallel rank holds, where the sequences stand one behind another.

Each sequence is cut into twice as many pieces as there are ranks, and rank r of R takes piece r from the front and
piece 2R - 1 - r from the back: with causal attention that is the same work for every rank, whatever the lengths.
Transformer Engine's attention and its `thd_get_partitioned_indices` have this order, and so have Megatron's positions.

A sequence's length must be a multiple of the number of pieces. Nothing here knows tensors.
"""

from collections.abc import Sequence
from itertools import accumulate


def pieces_of(rank: int, num_ranks: int) -> tuple[int, int]:
    """The two pieces of a sequence that a rank holds, of 2 x `num_ranks`."""
    return rank, 2 * num_ranks - 1 - rank


def own_positions(lengths: Sequence[int], rank: int, num_ranks: int) -> list[int]:
    """Positions in the pack, of sequences of `lengths`, that a rank holds, in its order."""
    positions: list[int] = []
    for start, length in zip(accumulate(lengths, initial=0), lengths, strict=False):
        assert length % (2 * num_ranks) == 0, "pieces of one length"
        size = length // (2 * num_ranks)
        for piece in pieces_of(rank, num_ranks):
            positions += range(start + piece * size, start + (piece + 1) * size)
    return positions


def gathered_places(lengths: Sequence[int], num_ranks: int) -> list[int]:
    """Where each position of the pack stands once the parts of all ranks are put one behind another."""
    gathered = [position for rank in range(num_ranks) for position in own_positions(lengths, rank, num_ranks)]
    places = [0] * len(gathered)
    for place, position in enumerate(gathered):
        places[position] = place
    return places
