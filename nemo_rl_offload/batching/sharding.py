"""A batch cut into the shards of the ranks, and what comes back put together again."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_rl_offload.batching.batch import Batch, num_samples, select, shard
from nemo_rl_offload.batching.plan import Lengths, MicrobatchPlan, MicrobatchSplit, PlannedMicrobatch


@dataclass(frozen=True)
class ShardedBatch:
    """The shards of a batch, in the order of the ranks."""

    shards: list[Batch]
    splits: list[MicrobatchSplit] | None
    """How each rank is to cut its shard; None: into a fixed number of samples."""
    _rows: Tensor
    """For each row of the batch, where it stands in the shards one after another."""

    def with_splits(self) -> list[tuple[Batch, MicrobatchSplit | None]]:
        """Each shard, and how its rank is to cut it."""
        if self.splits is None:
            return [(each, None) for each in self.shards]
        return list(zip(self.shards, self.splits, strict=True))

    def gather(self, parts: Sequence[Tensor]) -> Tensor:
        """Values [rows of a shard, ...] of all shards as values [rows of the batch, ...]."""
        return torch.cat(list(parts))[self._rows]


def shard_evenly(batch: Batch, num_shards: int, rows_per_sample: int) -> ShardedBatch:
    """Contiguous shards of equal size; see `batch.shard`."""
    return ShardedBatch(shard(batch, num_shards, rows_per_sample), None, torch.arange(num_samples(batch)))


def shard_by_plan(
    batch: Batch, rows_per_sample: int, make_plan: Callable[[list[Lengths]], MicrobatchPlan], *, is_packed: bool
) -> ShardedBatch:
    """Shards with rows in the order of a plan. Rows that fill up have `sample_mask` 0, where the batch has one."""
    lengths = batch["input_lengths"].view(-1, rows_per_sample).tolist()
    shortest = min(range(len(lengths)), key=lambda sample: max(lengths[sample]))
    shards, splits = [], []
    rows_of_shards: list[int] = []
    for microbatches in make_plan(lengths):
        samples = [sample for part in microbatches for sample in (*part.samples, *[shortest] * part.num_filled)]
        is_filled = [filled for part in microbatches for filled in _is_filled(part)]
        rows = [sample * rows_per_sample + row for sample in samples for row in range(rows_per_sample)]
        piece = select(batch, torch.tensor(rows))
        filled = torch.tensor(is_filled).repeat_interleave(rows_per_sample)
        if "sample_mask" in piece:
            piece["sample_mask"][filled] = 0
        rows_of_shards += [-1 if fills else row for row, fills in zip(rows, filled.tolist(), strict=True)]
        sizes = tuple((len(part.samples) + part.num_filled) * rows_per_sample for part in microbatches)
        shards.append(piece)
        splits.append(MicrobatchSplit(sizes, tuple(part.width for part in microbatches), is_packed))
    places = torch.tensor(rows_of_shards).argsort()
    return ShardedBatch(shards, splits, places[len(places) - num_samples(batch) :])


def _is_filled(part: PlannedMicrobatch) -> list[bool]:
    return [False] * len(part.samples) + [True] * part.num_filled
