"""One optimizer step, and log-probabilities without one, over Megatron's pipeline schedules.

Tensors of one value per token are aligned with `input_ids` [B, S]: position t holds what belongs to token t given the
tokens before it, and position 0 is 0.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from torch import Tensor

from nemo_rl_offload.batching.batch import Batch, microbatches, num_samples
from nemo_rl_offload.losses.reduction import Normalizers
from nemo_rl_offload.losses.registry import Loss
from nemo_rl_offload.megatron.model import MegatronModel


def token_logprobs(logits_BSV: Tensor, input_ids_BS: Tensor, temperature: float) -> Tensor:
    """log p(input_ids[:, t] | input_ids[:, :t]) at `temperature`, float32 [B, S], from logits [B, S, vocabulary / TP].

    Megatron's vocabulary-parallel cross entropy, so logits are never gathered over tensor-parallel ranks.
    """
    scaled = logits_BSV[:, :-1].float() / temperature
    nll = vocab_parallel_cross_entropy(scaled, input_ids_BS[:, 1:].contiguous())
    return torch.nn.functional.pad(-nll, (1, 0))


def to_device(batch: Mapping[str, Tensor]) -> Batch:
    """Move a batch to this worker's device."""
    device = torch.cuda.current_device()
    return {key: value.to(device) for key, value in batch.items()}


def _forward_step(process: Callable[[Tensor, Batch], Any], iterator: Iterator[Batch], chunk: Any) -> tuple[Tensor, Any]:
    piece = next(iterator)
    input_ids = piece["input_ids"]
    position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
    # Padding stands on the right, so a causal mask already keeps it from every real token.
    logits = chunk(input_ids, position_ids, None)
    return logits, partial(_on_logits, process, piece)


def _on_logits(
    process: Callable[[Tensor, Batch], Any], piece: Batch, logits: Tensor, non_loss_data: bool = False
) -> Any:
    return process(logits, piece)


def _run_schedule(
    model: MegatronModel, pieces: list[Batch], process: Callable[[Tensor, Batch], Any], *, forward_only: bool
) -> list[Any]:
    largest = pieces[0]["input_ids"]
    outputs: list[Any] = get_forward_backward_func()(
        forward_step_func=partial(_forward_step, process),
        data_iterator=iter(pieces),
        model=model.chunks,
        num_microbatches=len(pieces),
        seq_length=largest.shape[1],
        micro_batch_size=largest.shape[0],
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )
    return outputs


def train_step(
    model: MegatronModel,
    batch: Batch,
    loss: Loss,
    norm: Normalizers,
    micro_batch_size: int,
    temperature: float,
) -> dict[str, float]:
    """Take one optimizer step on this rank's shard of a global batch.

    `norm` counts the whole global batch, so that the loss is a sum over microbatches and ranks. Megatron divides each
    microbatch's loss by their number and averages gradients over data-parallel ranks; the loss is multiplied by both
    beforehand. Returns the loss function's metrics summed over microbatches and ranks, `grad_norm` (before clipping)
    and `lr` (of this step).
    """
    batch = to_device(batch)
    norm = Normalizers(*(count.to(batch["input_ids"].device) for count in norm))
    pieces = list(microbatches(batch, micro_batch_size))
    factor = len(pieces) * parallel_state.get_data_parallel_world_size()

    def process(logits: Tensor, piece: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        logprobs = token_logprobs(logits, piece["input_ids"], temperature)
        value, metrics = loss(logprobs, piece, norm)
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
    outputs = _run_schedule(model, pieces, process, forward_only=False)
    learning_rate = float(model.optimizer.param_groups[0]["lr"])
    _, grad_norm, _ = model.optimizer.step()
    model.scheduler.step(increment=1)
    return _reduce_metrics(outputs) | {"grad_norm": float(grad_norm or 0.0), "lr": learning_rate}


def _reduce_metrics(outputs: list[dict[str, Tensor]]) -> dict[str, float]:
    names = sorted(outputs[0])
    totals = torch.stack([sum((output[name] for output in outputs), torch.zeros(())) for name in names])
    dist.all_reduce(totals, group=parallel_state.get_data_parallel_group())
    return dict(zip(names, totals.tolist(), strict=True))


def compute_logprobs(model: MegatronModel, batch: Batch, micro_batch_size: int, temperature: float) -> Tensor:
    """Log-probabilities of every token of this rank's shard, float32 [B, S] on the CPU, without gradients."""
    width = batch["input_ids"].shape[1]
    assert num_samples(batch) > 0, "an empty shard"
    pieces = list(microbatches(to_device(batch), micro_batch_size))

    def process(logits: Tensor, piece: Batch) -> Tensor:
        logprobs = token_logprobs(logits, piece["input_ids"], temperature)
        return torch.nn.functional.pad(logprobs, (0, width - logprobs.shape[1])).cpu()

    for chunk in model.chunks:
        chunk.eval()
    with torch.no_grad():
        return torch.cat(_run_schedule(model, pieces, process, forward_only=True))
