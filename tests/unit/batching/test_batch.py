"""Padding, sharding and microbatches lose nothing and add nothing that counts."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_offload.batching.batch import Batch, microbatches, num_samples, pad_sequences, select, shard

SEQUENCES = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=6), min_size=1, max_size=9)


def make_batch(sequences: list[list[int]]) -> Batch:
    batch = pad_sequences(sequences, pad_id=0)
    return batch | {
        "token_mask": (batch["input_ids"] > 0).float(),
        "sample_mask": torch.ones(len(sequences)),
        "rewards": torch.arange(len(sequences)).float(),
    }


def unpad(batch: Batch) -> list[list[int]]:
    return [row[:length].tolist() for row, length in zip(batch["input_ids"], batch["input_lengths"], strict=True)]


@given(sequences=SEQUENCES)
@settings(max_examples=40, deadline=None)
def test_pad_sequences_round_trips_and_pads_on_the_right(sequences: list[list[int]]) -> None:
    batch = pad_sequences(sequences, pad_id=0)
    assert batch["input_ids"].dtype == batch["input_lengths"].dtype == torch.int64
    assert batch["input_ids"].shape == (len(sequences), max(map(len, sequences)))
    assert unpad(batch) == sequences
    assert int((batch["input_ids"] == 0).sum()) == batch["input_ids"].numel() - sum(map(len, sequences))


@given(sequences=SEQUENCES, num_shards=st.integers(1, 5))
@settings(max_examples=40, deadline=None)
def test_shards_are_equal_and_hold_every_sample_once(sequences: list[list[int]], num_shards: int) -> None:
    batch = make_batch(sequences)
    shards = shard(batch, num_shards)
    assert len(shards) == num_shards
    assert len({num_samples(part) for part in shards}) == 1
    valid = [select(part, part["sample_mask"].bool()) for part in shards]
    assert [row for part in valid for row in unpad(part)] == sequences
    assert torch.cat([part["rewards"] for part in valid]).tolist() == batch["rewards"].tolist()
    assert all((part["input_lengths"] > 0).all() for part in shards)
    assert batch["sample_mask"].min() == 1, "the batch itself must stay as it was"
    without_mask = {key: value for key, value in batch.items() if key != "sample_mask"}
    rows = [row for part in shard(without_mask, num_shards) for row in unpad(part)]
    assert rows[: len(sequences)] == sequences


@given(sequences=SEQUENCES, size=st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_microbatches_are_in_order_and_as_wide_as_their_longest(sequences: list[list[int]], size: int) -> None:
    pieces = list(microbatches(make_batch(sequences), size))
    assert len(pieces) == -(-len(sequences) // size)
    assert [row for piece in pieces for row in unpad(piece)] == sequences
    for piece in pieces:
        assert piece["input_ids"].shape == piece["token_mask"].shape
        assert piece["input_ids"].shape[1] == int(piece["input_lengths"].max())
        assert piece["rewards"].shape == piece["sample_mask"].shape == (num_samples(piece),)
        assert int(piece["token_mask"].sum()) == int(piece["input_lengths"].sum())


def test_tensors_that_disagree_on_the_number_of_samples_are_refused() -> None:
    with pytest.raises(AssertionError, match="disagree"):
        num_samples({"input_ids": torch.zeros(2, 3), "sample_mask": torch.zeros(3)})
