"""How a rank's shard of a batch is cut for Megatron's schedules.

Without a pipeline every microbatch is as wide as its longest sequence. Pipeline stages pass activations on in one shape
for the whole schedule: Megatron can announce shapes as it goes (`variable_seq_lengths`), but with two stages it sends
the announcements of both directions to the same rank without telling them apart. So all microbatches of a schedule
have one shape here, and the next schedule may have another. The same holds where the experts' ranks gather their tokens
as tensors of equal shapes. Sequence parallelism needs widths that the tensor-parallel ranks divide, context parallelism
such that twice its ranks do; in a pack these cut every sequence, so that each has such a length.

Products in 8 bits need numbers of tokens on each rank that their blocks divide (`fp8_tokens`).

What is filled up counts for nothing: positions behind a row's end are masked, rows repeat the last one with
`sample_mask` 0. Interleaved schedules want as many microbatches as a multiple of the pipeline's ranks: more such rows.

Where microbatches are numbers of tokens, a plan for all ranks has seen to all of this (`batching.plan`).
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from nemo_rl_offload.batching.batch import NO_ROUTE, ROUTED_EXPERTS, Batch, microbatches, num_samples, select
from nemo_rl_offload.batching.packing import Packing, PackPart
from nemo_rl_offload.batching.plan import MicrobatchSplit
from nemo_rl_offload.megatron.layers.packed_rotary import announce_pack
from nemo_rl_offload.specs.parallel_layout import sequence_multiple, width_multiple


@dataclass
class PackedSequences(PackedSeqParams):  # type: ignore[misc]
    """Megatron's description of a pack, with its sequences' lengths as numbers, which no device has to be asked for.

    Lengths and bounds are of whole sequences, also where ranks share them.
    """

    lengths: tuple[int, ...] = ()
    part: PackPart | None = None
    """What this context-parallel rank holds; None: everything."""


@dataclass(frozen=True)
class Microbatch:
    """A microbatch: rows [B, S] for the loss, and the same tokens as the model takes them, [B, S] or [1, width]."""

    batch: Batch
    packing: Packing | None = None

    def for_model(self, values: Tensor) -> Tensor:
        """Values of tokens, [B, S, ...], in the model's shape."""
        return values if self.packing is None else self.packing.pack(values)

    def for_loss(self, values: Tensor) -> Tensor:
        """Values of tokens in the model's shape as [B, S, ...]."""
        return values if self.packing is None else self.packing.unpack(values)

    @cached_property
    def input_ids(self) -> Tensor:
        """The model's input, int64."""
        return self.for_model(self.batch["input_ids"])

    @property
    def position_ids(self) -> Tensor:
        """Of the model's input, from 0 in each sequence."""
        if self.packing is not None:
            return self.packing.position_ids
        return torch.arange(self.input_ids.shape[1], device=self.input_ids.device).expand_as(self.input_ids)

    @property
    def part(self) -> PackPart | None:
        """What this context-parallel rank holds of a pack."""
        return None if self.packing is None else self.packing.part

    @property
    def packed_seq_params(self) -> PackedSequences | None:
        """What attention must know of a pack."""
        if self.packing is None:
            return None
        bounds, lengths = self.packing.bounds, self.packing.lengths
        # What fills a sequence up is part of it: `cu_seqlens` without it would bar kernels that take no gaps.
        of_ranks = (
            {}
            if self.part is None
            else {"cu_seqlens_q_padded": bounds, "cu_seqlens_kv_padded": bounds, "pad_between_seqs": False}
        )
        return PackedSequences(
            qkv_format="thd",
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            max_seqlen_q=max(lengths),
            max_seqlen_kv=max(lengths),
            lengths=lengths,
            part=self.part,
            **of_ranks,
        )


def split_into_microbatches(batch: Batch, split: int | MicrobatchSplit, config: TransformerConfig) -> list[Microbatch]:
    """Cut into microbatches of `split` many rows, or by a plan.

    In order, they hold all rows; with a fixed number of rows, what was filled up follows.
    """
    if isinstance(split, MicrobatchSplit):
        return _cut_by_plan(batch, split, config)
    num_stages = config.pipeline_model_parallel_size
    num_expert_ranks = config.expert_model_parallel_size * config.expert_tensor_parallel_size
    gathers = num_expert_ranks > 1 and config.moe_token_dispatcher_type == "allgather"
    multiple = width_multiple(*_sizes(config), config.fp8_recipe if config.fp8 else None)
    if num_stages == 1 and not gathers:
        return [Microbatch(_widen(piece, multiple)) for piece in microbatches(batch, split)]
    group_size = split * (num_stages if config.virtual_pipeline_model_parallel_size else 1)
    # Ranks that gather see shards of one batch, which are equally wide before they are trimmed.
    width = batch["input_ids"].shape[1] if gathers else int(batch["input_lengths"].max())
    whole = _widen(_trim(_fill(batch, _round_up(num_samples(batch), group_size)), width), multiple)
    return [Microbatch(select(whole, slice(i, i + split))) for i in range(0, num_samples(whole), split)]


def _sizes(config: TransformerConfig) -> tuple[int, int]:
    """Ranks that share the tokens of a layer by sequence parallelism, and by context parallelism."""
    return config.tensor_model_parallel_size if config.sequence_parallel else 1, config.context_parallel_size


def _cut_by_plan(batch: Batch, split: MicrobatchSplit, config: TransformerConfig) -> list[Microbatch]:
    pieces = []
    num_ranks = config.context_parallel_size
    cut = {
        "multiple": sequence_multiple(*_sizes(config)),
        "rank": parallel_state.get_context_parallel_rank() if num_ranks > 1 else 0,
        "num_ranks": num_ranks,
    }
    start = 0
    lengths = batch["input_lengths"].tolist()
    for size, width in zip(split.sizes, split.widths, strict=True):
        rows, own = select(batch, slice(start, start + size)), lengths[start : start + size]
        start += size
        if split.is_packed:
            rows = _trim(rows, max(own))
            packing = Packing.of_rows(own, rows["input_ids"].shape[1], width, rows["input_ids"].device, **cut)
            announce_pack(packing.bounds, packing.lengths)
            pieces.append(Microbatch(rows, packing))
        else:
            pieces.append(Microbatch(_widen(_trim(rows, width), width)))
    assert start == num_samples(batch), "the plan is for another shard"
    return pieces


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _fill(batch: Batch, size: int) -> Batch:
    num_real = num_samples(batch)
    filled = select(batch, torch.arange(size).clamp(max=num_real - 1))
    if "sample_mask" in filled:
        filled["sample_mask"][num_real:] = 0
    return filled


def _has_positions(batch: Batch, value: Tensor) -> bool:
    """Whether a value [B, ...] is one of tokens, [B, S, ...]."""
    return value.ndim > 1 and value.shape[1] == batch["input_ids"].shape[1]


def _trim(batch: Batch, width: int) -> Batch:
    return {key: value[:, :width] if _has_positions(batch, value) else value for key, value in batch.items()}


def _widen(batch: Batch, multiple: int) -> Batch:
    missing = -batch["input_ids"].shape[1] % multiple
    if not missing:
        return batch
    return {
        key: torch.nn.functional.pad(
            value, (0, 0) * (value.ndim - 2) + (0, missing), value=NO_ROUTE if key == ROUTED_EXPERTS else 0
        )
        if _has_positions(batch, value)
        else value
        for key, value in batch.items()
    }
