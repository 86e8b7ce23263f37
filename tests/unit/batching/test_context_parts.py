"""How context-parallel ranks share packs: every token once, equal work, and packs that come back as they were."""

from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_offload.batching.context_parts import gathered_places, own_positions, pieces_of
from nemo_rl_offload.batching.packing import Packing

RANKS = st.integers(1, 5)
HALVES = st.lists(st.integers(1, 4), min_size=1, max_size=6)


@given(halves=HALVES, num_ranks=RANKS)
@settings(max_examples=80, deadline=None)
def test_every_position_has_one_rank_and_all_work_alike(halves: list[int], num_ranks: int) -> None:
    lengths = [2 * num_ranks * half for half in halves]
    parts = [own_positions(lengths, rank, num_ranks) for rank in range(num_ranks)]
    assert sorted(position for part in parts for position in part) == list(range(sum(lengths)))
    for start, end in pairwise(accumulate(lengths, initial=0)):
        own = [[position - start for position in part if start <= position < end] for part in parts]
        assert len({len(each) for each in own}) == 1
        assert len({sum(each) for each in own}) == 1, "as many keys are seen by each rank's queries"
        assert all(each == sorted(each) for each in own)


@given(halves=HALVES, num_ranks=RANKS)
@settings(max_examples=80, deadline=None)
def test_gathered_parts_come_back_in_order(halves: list[int], num_ranks: int) -> None:
    lengths = [2 * num_ranks * half for half in halves]
    gathered = [position for rank in range(num_ranks) for position in own_positions(lengths, rank, num_ranks)]
    assert [gathered[place] for place in gathered_places(lengths, num_ranks)] == list(range(sum(lengths)))


def test_the_order_is_transformer_engines() -> None:
    """The example of its documentation: two sequences of 8 and 4 tokens over two ranks."""
    assert own_positions([8, 4], 0, 2) == [0, 1, 6, 7, 8, 11]
    assert own_positions([8, 4], 1, 2) == [2, 3, 4, 5, 9, 10]
    assert pieces_of(1, 4) == (1, 6)


def test_a_length_that_is_not_cut_evenly_is_an_error() -> None:
    with pytest.raises(AssertionError):
        own_positions([8, 6], 0, 2)


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    num_ranks=RANKS,
    tensor_size=st.sampled_from([1, 2]),
    extra=st.integers(0, 3),
    data=st.data(),
)
@settings(max_examples=40, deadline=None)
def test_a_pack_of_filled_up_sequences(
    lengths: list[int], num_ranks: int, tensor_size: int, extra: int, data: st.DataObject
) -> None:
    """The parts of all ranks are the pack; its rows' tokens come back, and nothing of what fills them up."""
    multiple = 2 * num_ranks * tensor_size if num_ranks > 1 else 1
    filled = [-(-length // multiple) * multiple for length in lengths]
    width, row_width = sum(filled) + extra * multiple, max(lengths) + data.draw(st.integers(0, 2))
    packings = [
        Packing.of_rows(lengths, row_width, width, "cpu", multiple=multiple, rank=rank, num_ranks=num_ranks)
        for rank in range(num_ranks)
    ]
    packing = packings[0]
    rows = torch.arange(len(lengths) * row_width).view(len(lengths), row_width) + 100
    packed = packing.pack(rows)
    assert packed.shape == packing.position_ids.shape == (1, width)
    assert packing.lengths == (*filled, *[extra * multiple] * (extra > 0))
    assert packing.bounds.tolist() == list(accumulate(packing.lengths, initial=0))
    for row, (start, length) in enumerate(zip(packing.bounds.tolist(), lengths, strict=False)):
        assert packed[0, start : start + length].tolist() == rows[row, :length].tolist()
        assert set(packed[0, start + length : start + filled[row]].tolist()) <= {int(rows[row, 0])}
        assert packing.position_ids[0, start : start + filled[row]].tolist() == list(range(filled[row]))
    is_learnable = (torch.arange(row_width) < torch.tensor(lengths)[:, None]) & (torch.arange(row_width) > 0)
    assert torch.equal(packing.unpack(packed), rows * is_learnable)
    if num_ranks == 1:
        assert packing.part is None
        return
    parts = [each.part for each in packings if each.part is not None]
    gathered = torch.cat([packed[0, part.positions] for part in parts])
    assert all(torch.equal(gathered[part.places], packed[0]) for part in parts)
    assert {len(part.positions) % tensor_size for part in parts} == {0}
