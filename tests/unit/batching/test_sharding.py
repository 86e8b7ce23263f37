"""A planned division loses no row, gives nothing else weight, and puts results back in order; packing is undone."""

from functools import partial

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_offload.batching.batch import Batch, num_samples
from nemo_rl_offload.batching.packing import Packing
from nemo_rl_offload.batching.plan import TokenBudget, plan_packed, plan_padded
from nemo_rl_offload.batching.sharding import shard_by_plan, shard_evenly


def make_batch(lengths: list[int]) -> Batch:
    width = max(lengths) + 1
    return {
        "input_ids": torch.arange(len(lengths) * width).view(-1, width) + 1,
        "input_lengths": torch.tensor(lengths),
        "sample_mask": torch.ones(len(lengths)),
    }


@given(
    lengths=st.lists(st.integers(1, 9), min_size=2, max_size=16).filter(lambda lengths: len(lengths) % 2 == 0),
    rows_per_sample=st.sampled_from([1, 2]),
    num_ranks=st.integers(1, 3),
    is_packed=st.booleans(),
    one_shape=st.booleans(),
)
@settings(max_examples=80, deadline=None)
def test_a_planned_division_puts_results_back_in_order(
    lengths: list[int], rows_per_sample: int, num_ranks: int, is_packed: bool, one_shape: bool
) -> None:
    batch = make_batch(lengths)
    budget = TokenBudget(20, 1, num_ranks=num_ranks, one_shape=one_shape)
    packed = partial(plan_packed, budget=budget, algorithm="modified_first_fit_decreasing")
    plan = packed if is_packed else partial(plan_padded, budget=budget)
    division = shard_by_plan(batch, rows_per_sample, plan, is_packed=is_packed)
    assert division.splits is not None
    for piece, split in zip(division.shards, division.splits, strict=True):
        assert sum(split.sizes) == num_samples(piece)
        assert split.is_packed == is_packed
        assert all(size % rows_per_sample == 0 for size in split.sizes)
        pairs = piece["input_ids"].view(-1, rows_per_sample, batch["input_ids"].shape[1])
        assert (pairs[:, 0, 0] == pairs[:, -1, 0] - (rows_per_sample - 1) * pairs.shape[-1]).all(), (
            "pairs stay together"
        )
    counted = torch.cat([piece["input_ids"][piece["sample_mask"] == 1] for piece in division.shards])
    assert sorted(counted[:, 0].tolist()) == batch["input_ids"][:, 0].tolist()
    assert torch.equal(division.gather([piece["input_ids"] for piece in division.shards]), batch["input_ids"])
    assert batch["sample_mask"].min() == 1, "the batch itself must stay as it was"


def test_an_even_division_puts_results_back_in_order() -> None:
    batch = make_batch([3, 1, 4, 1, 5])
    division = shard_evenly(batch, 2, 1)
    assert division.splits is None
    assert torch.equal(division.gather([piece["input_ids"] for piece in division.shards]), batch["input_ids"])


@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=6), missing=st.integers(0, 4))
@settings(max_examples=60, deadline=None)
def test_packing_keeps_rows_apart(lengths: list[int], missing: int) -> None:
    batch = make_batch(lengths)
    width = batch["input_ids"].shape[1]
    packing = Packing.of_rows(lengths, width, sum(lengths) + missing, "cpu")
    packed = packing.pack(batch["input_ids"])
    rows = [row[:length] for row, length in zip(batch["input_ids"], lengths, strict=True)]
    assert torch.equal(packed[0, : sum(lengths)], torch.cat(rows))
    assert packed.shape == (1, sum(lengths) + missing)
    assert sum(packing.lengths) == packed.shape[1]
    assert packing.lengths[: len(lengths)] == tuple(lengths)
    assert packing.bounds.tolist() == [sum(packing.lengths[:number]) for number in range(len(packing.lengths) + 1)]
    assert packing.bounds.dtype == torch.int32
    assert packing.position_ids.tolist() == [[place for length in packing.lengths for place in range(length)]]

    values = packed[..., None].double().requires_grad_()
    unpacked = packing.unpack(values)
    positions = torch.arange(width)
    is_inside = (positions > 0) & (positions < batch["input_lengths"][:, None])
    assert torch.equal(unpacked[..., 0], batch["input_ids"] * is_inside)
    unpacked.sum().backward()
    assert values.grad is not None
    assert int(values.grad.sum()) == int(is_inside.sum())
    assert not values.grad[0, sum(lengths) :].any()
