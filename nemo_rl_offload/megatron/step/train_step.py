"""One optimizer step, and log-probabilities without one, over Megatron's pipeline schedules.

Tensors of one value per token are aligned with `input_ids` [B, S]: position t holds what belongs to token t given the
tokens before it, and position 0 is 0.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from nemo_rl_offload.adapters.megatron_core.interface import forward_only
from nemo_rl_offload.batching.batch import Batch, num_samples
from nemo_rl_offload.batching.plan import MicrobatchSplit
from nemo_rl_offload.losses.reduction import Normalizers, valid_tokens
from nemo_rl_offload.losses.registry import Loss
from nemo_rl_offload.megatron.build.model import MegatronModel, unwrap
from nemo_rl_offload.megatron.step.context_parallel import shard_for_cp
from nemo_rl_offload.megatron.step.finite import all_finite
from nemo_rl_offload.megatron.step.head import (
    gather_logprobs,
    map_logit_chunks,
    target_logprobs,
    token_entropy,
    topk_logit_chunks,
)
from nemo_rl_offload.megatron.step.microbatches import Microbatch, split_into_microbatches
from nemo_rl_offload.megatron.step.moe_metrics import collect_moe_metrics, forget_routing


def token_logprobs(
    logits_BSV: Tensor, input_ids_BS: Tensor, temperature: float, chunk_size: int | None = None
) -> Tensor:
    """log p(input_ids[:, t] | input_ids[:, :t]) at `temperature`, float32 [B, S], from logits [B, S, vocabulary / TP].

    Megatron's vocabulary-parallel cross entropy, so logits are never gathered over tensor-parallel ranks.
    """
    return map_logit_chunks(target_logprobs, logits_BSV, input_ids_BS, temperature=temperature, chunk_size=chunk_size)


def to_device(batch: Mapping[str, Tensor]) -> Batch:
    """Move a batch to this worker's device."""
    device = torch.cuda.current_device()
    return {key: value.to(device) for key, value in batch.items()}


def _forward_step(
    process: Callable[[Tensor, Microbatch], Any], iterator: Iterator[Microbatch], chunk: Any
) -> tuple[Tensor, Any]:
    piece = next(iterator)
    # Padding stands on the right, so a causal mask already keeps it from every real token.
    further: dict[str, Any] = {}
    if piece.packing is not None:
        further["packed_seq_params"] = piece.packed_seq_params
    if unwrap(chunk).config.mtp_num_layers:
        # Layers that predict further tokens have a loss of their own, which Megatron adds to the gradients.
        is_scored = "token_mask" not in piece.batch
        mask = torch.ones_like(piece.batch["input_ids"]) if is_scored else valid_tokens(piece.batch).long()
        further["loss_mask"] = shard_for_cp(piece.for_model(mask))
    logits = chunk(shard_for_cp(piece.input_ids), shard_for_cp(piece.position_ids), None, **further)
    return logits, partial(_on_logits, process, piece)


def _on_logits(
    process: Callable[[Tensor, Microbatch], Any], piece: Microbatch, logits: Tensor, non_loss_data: bool = False
) -> Any:
    return process(logits, piece)


def _run_schedule(
    model: MegatronModel, pieces: list[Microbatch], process: Callable[[Tensor, Microbatch], Any], *, forward_only: bool
) -> list[Any]:
    """What `process` gave for each microbatch; nothing before the last pipeline stage, where there are no logits."""
    num_rows, width = pieces[0].input_ids.shape
    outputs: list[Any] = get_forward_backward_func()(
        forward_step_func=partial(_forward_step, process),
        data_iterator=[iter(pieces) for _ in model.chunks],
        model=model.chunks,
        num_microbatches=len(pieces),
        seq_length=width,
        micro_batch_size=num_rows,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )
    return outputs


def _apply(
    loss: Loss, logits: Tensor, piece: Microbatch, norm: Normalizers, temperature: float, chunk_size: int | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Give the loss the log-probabilities, and what else it requires of the logits."""
    of_logits = partial(map_logit_chunks, temperature=temperature, chunk_size=chunk_size)
    batch = piece.batch
    if "entropy" in loss.required:
        batch = batch | {"entropy": piece.for_loss(of_logits(token_entropy, logits))}
    if "topk_logprobs" in loss.required:
        ids = piece.for_model(batch["teacher_topk_indices"])
        batch = batch | {"topk_logprobs": piece.for_loss(of_logits(gather_logprobs, logits, ids))}
    logprobs = token_logprobs(logits, piece.input_ids, temperature, chunk_size)
    return loss(piece.for_loss(logprobs), batch, norm)


def train_step(
    model: MegatronModel,
    batch: Batch,
    loss: Loss,
    norm: Normalizers,
    microbatches: int | MicrobatchSplit,
    temperature: float,
    chunk_size: int | None = None,
) -> dict[str, float]:
    """Take one optimizer step on this rank's shard of a global batch.

    `microbatches` is the number of rows in each, or how a plan cuts the shard. `chunk_size` is that of
    `head.map_logit_chunks`.
    `norm` counts the whole global batch, so that the loss is a sum over microbatches and ranks. Megatron divides each
    microbatch's loss by their number and averages gradients over data-parallel ranks; the loss is multiplied by both
    beforehand. A loss or gradient that is not finite leaves weights, optimizer and schedule as they are.

    Returns the loss function's metrics summed over microbatches and ranks (on the last pipeline stage), those of the
    experts' routers, `grad_norm` (before clipping), `lr` (of this step) and `skipped_updates` (1 where there was none).
    """
    forget_routing(model.modules)
    batch = to_device(batch)
    norm = Normalizers(*(count.to(batch["input_ids"].device) for count in norm))
    pieces = split_into_microbatches(batch, microbatches, model.config)
    factor = len(pieces) * parallel_state.get_data_parallel_world_size()

    def process(logits: Tensor, piece: Microbatch) -> tuple[Tensor, dict[str, Tensor]]:
        value, metrics = _apply(loss, logits, piece, norm, temperature, chunk_size)
        # Megatron divides the returned loss in place, and a detached metric shares its storage.
        return value * factor, {key: metric.clone() for key, metric in metrics.items()}

    attempt = partial(_forward_backward, model, pieces, process)
    outputs = attempt() if model.guard is None else model.guard.run(attempt)
    learning_rate = float(model.optimizer.param_groups[0]["lr"])
    grad_norm = None
    if is_finite := all_finite(model, outputs):
        _, grad_norm, _ = model.optimizer.step()
        model.weights_are_whole = not model.chunks[0].ddp_config.overlap_param_gather
        model.scheduler.step(increment=1)
    return {
        **_reduce_metrics(outputs),
        **collect_moe_metrics(model.config, len(pieces)),
        **({} if model.guard is None else model.guard.metrics()),
        "grad_norm": float(grad_norm or 0.0),
        "lr": learning_rate,
        "skipped_updates": float(not is_finite),
    }


def _forward_backward(
    model: MegatronModel, pieces: list[Microbatch], process: Callable[[Tensor, Microbatch], Any]
) -> list[dict[str, Tensor]]:
    config = model.config
    config.finalize_model_grads_func = finalize_model_grads
    config.no_sync_func = (
        model.chunks[0].no_sync if len(model.chunks) == 1 else [chunk.no_sync for chunk in model.chunks]
    )
    for chunk in model.chunks:
        chunk.train()
        chunk.zero_grad_buffer()
    model.optimizer.zero_grad()
    return _run_schedule(model, pieces, process, forward_only=False)


def _reduce_metrics(outputs: list[dict[str, Tensor]]) -> dict[str, float]:
    if not outputs:
        return {}
    names = sorted(outputs[0])
    totals = torch.stack([sum((output[name] for output in outputs), torch.zeros(())) for name in names])
    dist.all_reduce(totals, group=parallel_state.get_data_parallel_group())
    return dict(zip(names, totals.tolist(), strict=True))


def evaluate(
    model: MegatronModel,
    batch: Batch,
    loss: Loss,
    norm: Normalizers,
    microbatches: int | MicrobatchSplit,
    temperature: float,
    chunk_size: int | None = None,
) -> dict[str, float]:
    """The loss function's metrics on this rank's shard of a batch, summed over microbatches and ranks, as they are."""
    norm = Normalizers(*(count.to(torch.cuda.current_device()) for count in norm))

    def process(logits: Tensor, piece: Microbatch) -> dict[str, Tensor]:
        return _apply(loss, logits, piece, norm, temperature, chunk_size)[1]

    return _reduce_metrics(_forward(model, batch, microbatches, process))


def compute_logprobs(
    model: MegatronModel,
    batch: Batch,
    microbatches: int | MicrobatchSplit,
    temperature: float,
    chunk_size: int | None = None,
) -> Tensor | None:
    """Log-probabilities of every token of this rank's shard, float32 [B, S] on the CPU, without gradients.

    None on ranks before the last pipeline stage.
    """

    def process(logits: Tensor, piece: Microbatch) -> Tensor:
        return piece.for_loss(token_logprobs(logits, piece.input_ids, temperature, chunk_size)).cpu()

    outputs = _forward(model, batch, microbatches, process)
    return _rows(batch, outputs) if outputs else None


def compute_topk_logits(
    model: MegatronModel,
    batch: Batch,
    microbatches: int | MicrobatchSplit,
    temperature: float,
    k: int,
    num_tokens: int,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor] | None:
    """The largest logits of this rank's shard, over temperature, float32 [B, S, K], and their token ids, int64.

    Position t holds what predicts token t; position 0 is 0. Only the first `num_tokens` of the vocabulary count.
    None on ranks before the last pipeline stage.
    """

    def process(logits: Tensor, piece: Microbatch) -> tuple[Tensor, ...]:
        top = topk_logit_chunks(logits, k, num_tokens, temperature=temperature, chunk_size=chunk_size)
        return tuple(piece.for_loss(values).cpu() for values in top)

    outputs = _forward(model, batch, microbatches, process)
    if not outputs:
        return None
    values, ids = zip(*outputs, strict=True)
    return _rows(batch, values), _rows(batch, ids)


def _rows(batch: Batch, parts: Sequence[Tensor]) -> Tensor:
    """What was computed for each microbatch, [b, s, ...], as one tensor [B, S, ...] without what was filled up."""
    width = batch["input_ids"].shape[1]
    widened = [F.pad(part, (0, 0) * (part.ndim - 2) + (0, width - part.shape[1])) for part in parts]
    return torch.cat(widened)[: num_samples(batch)]


def _forward(
    model: MegatronModel,
    batch: Batch,
    microbatches: int | MicrobatchSplit,
    process: Callable[[Tensor, Microbatch], Any],
) -> list[Any]:
    assert num_samples(batch) > 0, "an empty shard"
    pieces = split_into_microbatches(to_device(batch), microbatches, model.config)
    for chunk in model.chunks:
        chunk.eval()
    with torch.no_grad(), forward_only(model.config):
        return _run_schedule(model, pieces, process, forward_only=True)
