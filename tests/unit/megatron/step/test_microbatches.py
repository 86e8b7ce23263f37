"""Microbatches for schedules that want them in one shape: nothing real is lost, nothing else counts."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core import parallel_state

from nemo_rl_offload.batching.batch import NO_ROUTE, ROUTED_EXPERTS, Batch, microbatches, num_samples
from nemo_rl_offload.batching.context_parts import own_positions
from nemo_rl_offload.batching.plan import MicrobatchSplit
from nemo_rl_offload.megatron.step.microbatches import split_into_microbatches


def config(**changes: object) -> SimpleNamespace:
    sizes = {f"{name}_model_parallel_size": 1 for name in ("tensor", "pipeline", "expert")}
    rest = {
        "context_parallel_size": 1,
        "expert_tensor_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": None,
        "sequence_parallel": False,
        "moe_token_dispatcher_type": "alltoall",
        "fp8": None,
        "fp8_recipe": "delayed",  # Megatron's default
    }
    return SimpleNamespace(**sizes | rest | changes)


def make_batch(lengths: list[int], width: int) -> Batch:
    size = len(lengths)
    positions = torch.arange(width)
    return {
        "input_ids": torch.arange(size * width).view(size, width) + 1,
        "input_lengths": torch.tensor(lengths),
        "token_mask": (positions < torch.tensor(lengths)[:, None]).long(),
        "sample_mask": torch.ones(size),
        "teacher": torch.arange(size * width * 2).view(size, width, 2),
        "weight": torch.arange(size),
    }


cases = st.lists(st.integers(1, 9), min_size=1, max_size=9), st.integers(1, 4)


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize(("recipe", "tokens"), [("tensorwise", 16), ("blockwise", 128)])
@pytest.mark.parametrize(("tensor_size", "context_size"), [(1, 1), (2, 1), (1, 3), (2, 2)])
def test_in_eight_bits_each_rank_has_whole_blocks_of_tokens(
    recipe: str, tokens: int, tensor_size: int, context_size: int, num_stages: int
) -> None:
    layout = config(
        fp8="e4m3",
        fp8_recipe=recipe,
        pipeline_model_parallel_size=num_stages,
        tensor_model_parallel_size=tensor_size,
        sequence_parallel=True,
        context_parallel_size=context_size,
    )
    for piece in split_into_microbatches(make_batch([3, 9, 5], width=11), 2, layout):
        width = piece.input_ids.shape[1]
        assert width == tokens * tensor_size * context_size
        assert not piece.batch["token_mask"][:, 9:].any()


@settings(deadline=None, max_examples=60)
@given(*cases, st.sampled_from([None, 2]), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 3]))
def test_a_pipelines_microbatches_have_one_shape_and_hold_all(
    lengths: list[int], size: int, num_parts: int | None, tensor_size: int, context_size: int
) -> None:
    batch = make_batch(lengths, width=11)
    layout = config(
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=num_parts,
        tensor_model_parallel_size=tensor_size,
        sequence_parallel=tensor_size > 1,
        context_parallel_size=context_size,
    )
    pieces = [piece.batch for piece in split_into_microbatches(batch, size, layout)]
    assert len({piece["input_ids"].shape for piece in pieces}) == 1
    assert all(num_samples(piece) == size for piece in pieces)
    assert not num_parts or len(pieces) % 2 == 0
    width = pieces[0]["input_ids"].shape[1]
    multiple = tensor_size * (1 if context_size == 1 else 2 * context_size)
    assert width % multiple == 0
    assert max(lengths) <= width < max(lengths) + multiple
    whole = {key: torch.cat([piece[key] for piece in pieces]) for key in batch}
    kept = max(lengths)
    for key, value in batch.items():
        real = whole[key][: len(lengths)]
        if value.ndim > 1:
            assert torch.equal(real[:, :kept], value[:, :kept])
            assert not real[:, kept:].any()
        else:
            assert torch.equal(real, value)
    assert not whole["sample_mask"][len(lengths) :].any()
    assert len(whole["sample_mask"]) - len(lengths) < size * (2 if num_parts else 1)


@settings(deadline=None, max_examples=30)
@given(*cases)
def test_without_a_pipeline_nothing_is_filled_up(lengths: list[int], size: int) -> None:
    batch = make_batch(lengths, width=11)
    for layout in (config(), config(expert_model_parallel_size=2)):
        pieces = [piece.batch for piece in split_into_microbatches(batch, size, layout)]
        expected = list(microbatches(batch, size))
        assert len(pieces) == len(expected)
        for piece, other in zip(pieces, expected, strict=True):
            assert all(torch.equal(piece[key], other[key]) for key in batch)


def test_what_fills_rows_up_has_no_experts_of_generations() -> None:
    """A zero would be the first expert, twice."""
    batch = make_batch([3, 2], width=3) | {ROUTED_EXPERTS: torch.ones(2, 3, 1, 2, dtype=torch.int8)}
    layout = config(tensor_model_parallel_size=2, sequence_parallel=True)
    (piece,) = split_into_microbatches(batch, 2, layout)
    assert piece.batch[ROUTED_EXPERTS].shape == (2, 4, 1, 2)
    assert (piece.batch[ROUTED_EXPERTS][:, :3] == 1).all()
    assert (piece.batch[ROUTED_EXPERTS][:, 3] == NO_ROUTE).all()
    assert (piece.batch["input_ids"][:, 3] == 0).all()


@pytest.mark.parametrize("size", ["expert_model_parallel_size", "expert_tensor_parallel_size"])
def test_ranks_that_gather_tokens_are_equally_wide(size: str) -> None:
    layout = config(**{size: 2}, moe_token_dispatcher_type="allgather")
    for lengths in ([1, 2, 3], [9, 4, 4]):
        pieces = split_into_microbatches(make_batch(lengths, 11), 2, layout)
        assert [piece.input_ids.shape for piece in pieces] == [(2, 11)] * 2


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_pack_that_ranks_share_is_described_whole_and_filled_up(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Megatron and Transformer Engine read it: bounds are of whole sequences, each a multiple of all pieces."""
    monkeypatch.setattr(parallel_state, "get_context_parallel_rank", lambda: rank)
    layout = config(context_parallel_size=3, tensor_model_parallel_size=2, sequence_parallel=True)
    (piece,) = split_into_microbatches(make_batch([5, 13, 2], 13), MicrobatchSplit((3,), (60,), True), layout)
    params = piece.packed_seq_params
    assert params is not None
    assert params.lengths == (12, 24, 12, 12)
    for bounds in (params.cu_seqlens_q, params.cu_seqlens_kv, params.cu_seqlens_q_padded, params.cu_seqlens_kv_padded):
        assert bounds.tolist() == [0, 12, 36, 48, 60]
        assert bounds.dtype == torch.int32
    assert params.max_seqlen_q == params.max_seqlen_kv == 24
    assert params.pad_between_seqs is False
    assert piece.part is not None
    assert piece.part.positions.tolist() == own_positions(params.lengths, rank, 3)


def test_a_pack_of_one_rank_is_described_as_before() -> None:
    (piece,) = split_into_microbatches(make_batch([5, 13, 2], 13), MicrobatchSplit((3,), (24,), True), config())
    params = piece.packed_seq_params
    assert params is not None
    assert params.lengths == (5, 13, 2, 4)
    assert params.part is params.cu_seqlens_q_padded is params.pad_between_seqs is None
