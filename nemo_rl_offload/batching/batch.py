"""A batch is a dictionary of tensors with the same first dimension, the samples.

Names follow NeMo-RL: ``input_ids`` [B,S] int64 padded on the right, ``input_lengths`` [B] int64,
``token_mask`` [B,S], ``sample_mask`` [B]; every other [B,S] tensor is aligned with ``input_ids``.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

Batch = dict[str, Tensor]

ROUTED_EXPERTS = "routed_experts"
"""[B, S, MoE layers, top-k], small integers: the experts that generation's routers chose for each token."""
NO_ROUTE = -1
"""Stands there in the place of every expert of a token that generation says nothing of."""


def pad_sequences(sequences: Sequence[Sequence[int]], pad_id: int) -> Batch:
    """Return ``input_ids`` [B,S], padded on the right to the longest, and ``input_lengths`` [B]; int64."""
    assert sequences, "no sequences"
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    input_ids = torch.full((len(sequences), int(lengths.max())), pad_id)
    for row, sequence in zip(input_ids, sequences, strict=True):
        row[: len(sequence)] = torch.tensor(sequence, dtype=torch.int64)
    return {"input_ids": input_ids, "input_lengths": lengths}


def num_samples(batch: Batch) -> int:
    """Return the size of the first dimension."""
    sizes = {key: len(value) for key, value in batch.items()}
    assert len(set(sizes.values())) == 1, f"tensors disagree on the number of samples: {sizes}"
    return next(iter(sizes.values()))


def select(batch: Batch, samples: slice | Tensor) -> Batch:
    """Return the given samples of every tensor; a slice gives views, an index int64 [N] or a mask bool
    [B] copies."""
    return {key: value[samples] for key, value in batch.items()}


def shard(batch: Batch, num_shards: int, rows_per_sample: int = 1) -> list[Batch]:
    """Cut into ``num_shards`` contiguous shards of equal size, each of whole samples of ``rows_per_sample`` rows.

    Where the size does not divide, the last row is repeated behind the end: as a real sequence it is safe
    to compute on, and its ``sample_mask``, where the batch has one, is 0. Without one, the caller drops what
    follows the batch.
    """
    size = num_samples(batch)
    assert size, "an empty batch cannot be sharded"
    assert size % rows_per_sample == 0, "half a sample"
    shard_size = -(-size // (num_shards * rows_per_sample)) * rows_per_sample
    padded = select(batch, torch.arange(shard_size * num_shards).clamp(max=size - 1))
    if "sample_mask" in padded:
        padded["sample_mask"][size:] = 0
    return [select(padded, slice(i * shard_size, (i + 1) * shard_size)) for i in range(num_shards)]


def microbatches(batch: Batch, size: int) -> Iterator[Batch]:
    """Yield contiguous pieces of at most ``size`` samples, each cut to its longest sequence."""
    for start in range(0, num_samples(batch), size):
        yield _trim(select(batch, slice(start, start + size)))


def _trim(batch: Batch) -> Batch:
    padded_width = batch["input_ids"].shape[1]
    width = int(batch["input_lengths"].max())
    return {
        key: value[:, :width] if value.ndim > 1 and value.shape[1] == padded_width else value
        for key, value in batch.items()
    }
