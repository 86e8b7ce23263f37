"""One optimizer step over Megatron's pipeline schedules, and the same loss without one."""

from functools import partial

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from torch import Tensor

from nemo_rl_offload.batching.batch import Batch
from nemo_rl_offload.batching.plan import MicrobatchSplit
from nemo_rl_offload.losses.reduction import Normalizers
from nemo_rl_offload.losses.registry import Loss
from nemo_rl_offload.megatron.build.model import MegatronModel
from nemo_rl_offload.megatron.step.finite import all_finite
from nemo_rl_offload.megatron.step.head import HeadFactory, OutputHead
from nemo_rl_offload.megatron.step.microbatches import Microbatch, split_into_microbatches
from nemo_rl_offload.megatron.step.moe_metrics import collect_moe_metrics, forget_routing
from nemo_rl_offload.megatron.step.schedule import (
    forward_and_backward,
    forward_without_gradients,
    shape_of,
    to_device,
)

type Metrics = dict[str, Tensor]
"""Of one microbatch, 0-dim each."""


def apply_loss(loss: Loss, norm: Normalizers, head: OutputHead, microbatch: Microbatch) -> tuple[Tensor, Metrics]:
    """Give the loss the log-probabilities, and what else it requires of the head."""
    batch = microbatch.batch
    further = batch["teacher_topk_indices"] if "topk_logprobs" in loss.required else None
    predicted = head.predict(batch["input_ids"], further, entropy="entropy" in loss.required)
    if predicted.entropy is not None:
        batch = batch | {"entropy": predicted.entropy}
    if predicted.further_logprobs is not None:
        batch = batch | {"topk_logprobs": predicted.further_logprobs}
    return loss(predicted.logprobs, batch, norm)


def train_step(
    model: MegatronModel,
    batch: Batch,
    loss: Loss,
    norm: Normalizers,
    split: int | MicrobatchSplit,
    heads: HeadFactory,
) -> dict[str, float]:
    """Take one optimizer step on this rank's shard of a global batch.

    `split` is the number of rows in each microbatch, or how a plan cuts the shard.
    `norm` counts the whole global batch, so that the loss is a sum over microbatches and ranks. Megatron divides each
    microbatch's loss by their number and averages gradients over data-parallel ranks; the loss is multiplied by both
    beforehand. A loss or gradient that is not finite leaves weights, optimizer and schedule as they are.

    Returns the loss function's metrics summed over microbatches and ranks (on the last pipeline stage), those of the
    experts' routers and of CUDA graphs, `grad_norm` (before clipping), `lr` (of this step) and `skipped_updates` (1
    where there was none).
    """
    assert model.optimizer is not None, "built with num_steps=None"
    assert model.scheduler is not None
    forget_routing(model.modules)
    batch = to_device(batch)
    norm = Normalizers(*(count.to(batch["input_ids"].device) for count in norm))
    microbatches = split_into_microbatches(batch, split, model.config)
    if model.graphs is not None:
        model.graphs.begin_step([shape_of(microbatch) for microbatch in microbatches])

    attempt = partial(accumulate_gradients, model, microbatches, loss, norm, heads)
    outputs = attempt() if model.guard is None else model.guard.run(attempt)
    learning_rate = float(model.optimizer.param_groups[0]["lr"])
    grad_norm = None
    if is_finite := all_finite(model, outputs):
        with model.measure("optimizer_step"):
            _leave_room(model)
            _, grad_norm, _ = model.optimizer.step()
            model.optimizer.zero_grad()  # Megatron's float32 copies of narrower gradients, if there are any
            model.weights_are_whole = not model.chunks[0].ddp_config.overlap_param_gather
            model.quantize_weights()
        model.scheduler.step(increment=1)
    return {
        **_reduce_metrics(outputs),
        **collect_moe_metrics(model.config, len(microbatches)),
        **({} if model.guard is None else model.guard.metrics()),
        **({} if model.graphs is None else model.graphs.metrics()),
        "grad_norm": float(grad_norm or 0.0),
        "lr": learning_rate,
        "skipped_updates": float(not is_finite),
    }


def _leave_room(model: MegatronModel) -> None:
    """Before the first update: what libraries take when they are first used (NCCL's communicators, kernels' code) they
    do not get from torch's cache, which backward has left full."""
    if not model.has_stepped and torch.cuda.is_available():
        torch.cuda.empty_cache()
    model.has_stepped = True


def accumulate_gradients(
    model: MegatronModel, microbatches: list[Microbatch], loss: Loss, norm: Normalizers, heads: HeadFactory
) -> list[Metrics]:
    """Add the batch's gradients to the model's empty buffers; returns each microbatch's metrics (last stage)."""
    assert model.optimizer is not None, "built with num_steps=None"
    factor = len(microbatches) * parallel_state.get_data_parallel_world_size()

    def process(head: OutputHead, microbatch: Microbatch) -> tuple[Tensor, Metrics]:
        value, metrics = apply_loss(loss, norm, head, microbatch)
        # Megatron divides the returned loss in place, and a detached metric shares its storage.
        return value * factor, {key: metric.clone() for key, metric in metrics.items()}

    config = model.config
    config.finalize_model_grads_func = finalize_model_grads
    config.no_sync_func = (
        model.chunks[0].no_sync if len(model.chunks) == 1 else [chunk.no_sync for chunk in model.chunks]
    )
    for chunk in model.chunks:
        chunk.train()
        chunk.zero_grad_buffer()
    model.optimizer.zero_grad()
    return forward_and_backward(model, microbatches, heads, process)


def evaluate(
    model: MegatronModel,
    batch: Batch,
    loss: Loss,
    norm: Normalizers,
    split: int | MicrobatchSplit,
    heads: HeadFactory,
) -> dict[str, float]:
    """The loss function's metrics on this rank's shard of a batch, summed over microbatches and ranks, as they are."""
    norm = Normalizers(*(count.to(torch.cuda.current_device()) for count in norm))

    def process(head: OutputHead, microbatch: Microbatch) -> Metrics:
        return apply_loss(loss, norm, head, microbatch)[1]

    return _reduce_metrics(forward_without_gradients(model, batch, split, heads, process))


def _reduce_metrics(outputs: list[Metrics]) -> dict[str, float]:
    if not outputs:
        return {}
    names = sorted(outputs[0])
    totals = torch.stack([sum((output[name] for output in outputs), torch.zeros(())) for name in names])
    dist.all_reduce(totals, group=parallel_state.get_data_parallel_group())
    return dict(zip(names, totals.tolist(), strict=True))
