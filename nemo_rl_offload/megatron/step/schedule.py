"""One run of Megatron's pipeline schedule over the microbatches of a batch.

The schedule calls the model's chunks for each microbatch; on the last pipeline stage what they return becomes an
`OutputHead`, and the pass says what is made of that: a loss, or values that leave.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from nemo_rl_offload.adapters.megatron_core import interface as offload_interface
from nemo_rl_offload.batching.batch import ROUTED_EXPERTS, Batch, num_samples
from nemo_rl_offload.batching.plan import MicrobatchSplit
from nemo_rl_offload.losses.reduction import valid_tokens
from nemo_rl_offload.megatron.build.model import MegatronModel, unwrap
from nemo_rl_offload.megatron.protocols import ModelChunk
from nemo_rl_offload.megatron.step.context_parallel import shard_for_cp
from nemo_rl_offload.megatron.step.cuda_graphs import LayerGraphs, Shape
from nemo_rl_offload.megatron.step.head import HeadFactory, OutputHead
from nemo_rl_offload.megatron.step.microbatches import Microbatch, split_into_microbatches
from nemo_rl_offload.megatron.step.router_replay import end_replay, replaying


def to_device(batch: Mapping[str, Tensor]) -> Batch:
    """Move a batch to this worker's device; routed experts follow with each microbatch."""
    device = torch.cuda.current_device()
    return {key: value if key == ROUTED_EXPERTS else value.to(device) for key, value in batch.items()}


type Process[T] = Callable[[OutputHead, Microbatch], T]
"""What a pass makes of a microbatch. Before the last pipeline stage there is no head, and nothing is called."""


def forward_and_backward[T](
    model: MegatronModel, microbatches: list[Microbatch], heads: HeadFactory, process: Process[tuple[Tensor, T]]
) -> list[T]:
    """Backward through the loss of each microbatch; `process` returns that, 0-dim, and what is to be kept of it."""
    outputs: list[T] = _run_schedule(model, microbatches, heads, process, forward_only=False)
    return outputs


def forward_without_gradients[T](
    model: MegatronModel, batch: Batch, split: int | MicrobatchSplit, heads: HeadFactory, process: Process[T]
) -> list[T]:
    """What `process` returned for each microbatch of this rank's shard, in evaluation mode and without offloading."""
    assert num_samples(batch) > 0, "an empty shard"
    microbatches = split_into_microbatches(to_device(batch), split, model.config)
    for chunk in model.chunks:
        chunk.eval()
    with torch.no_grad(), offload_interface.forward_only(model.config):
        outputs: list[T] = _run_schedule(model, microbatches, heads, process, forward_only=True)
    return outputs


def _run_schedule(
    model: MegatronModel,
    microbatches: list[Microbatch],
    heads: HeadFactory,
    process: Process[object],
    *,
    forward_only: bool,
) -> Any:
    num_rows, width = microbatches[0].input_ids.shape
    try:
        return get_forward_backward_func()(
            forward_step_func=partial(_forward_step, None if forward_only else model.graphs, heads, process),
            data_iterator=[iter(microbatches) for _ in model.chunks],
            model=model.chunks,
            num_microbatches=len(microbatches),
            seq_length=width,
            micro_batch_size=num_rows,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
    finally:
        end_replay(model.modules)


def shape_of(microbatch: Microbatch) -> Shape:
    """The shape of the model's input."""
    num_rows, width = microbatch.input_ids.shape
    return num_rows, width


def _forward_step(
    graphs: LayerGraphs | None,
    heads: HeadFactory,
    process: Process[object],
    iterator: Iterator[Microbatch],
    chunk: ModelChunk,
) -> tuple[Any, Callable[..., object]]:
    microbatch = next(iterator)
    # Padding stands on the right, so a causal mask already keeps it from every real token.
    further = dict(heads.forward_kwargs)
    if microbatch.packing is not None:
        further["packed_seq_params"] = microbatch.packed_seq_params
    if unwrap(chunk).config.mtp_num_layers:
        # Layers that predict further tokens have a loss of their own, which Megatron adds to the gradients.
        batch = microbatch.batch
        is_scored = "token_mask" not in batch
        mask_BS = torch.ones_like(batch["input_ids"]) if is_scored else valid_tokens(batch).long()
        further["loss_mask"] = shard_for_cp(microbatch.for_model(mask_BS), microbatch.part)
    ids, positions = (shard_for_cp(each, microbatch.part) for each in (microbatch.input_ids, microbatch.position_ids))
    mask = None if graphs is None else graphs.select(shape_of(microbatch))
    with replaying(unwrap(chunk), microbatch):
        output = chunk(ids, positions, mask, **further)
    return output, partial(_on_output, heads, process, microbatch)


def _on_output(
    heads: HeadFactory, process: Process[object], microbatch: Microbatch, output: Any, non_loss_data: bool = False
) -> object:
    """Megatron's callback with what the last stage's forward returned."""
    return process(heads.build(output, microbatch), microbatch)
