"""Functions of logits whose vocabulary is split over tensor-parallel ranks. Logits are never gathered.

A rank holds [B, S, vocabulary / TP]; every result is the same on all of its tensor-parallel group. Gradients follow
Megatron's pair of regions: what is summed over ranks passes its gradient on as it is, and what every rank uses on its
own part of the vocabulary sums the gradients of all.

The logits' tensor is among the largest of a step, and each of these functions makes float32 copies of it.
`map_logit_chunks` cuts the sequence into chunks, and computes a chunk's copies again in the backward pass instead of
keeping them.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from nemo_rl_offload.megatron.step.context_parallel import gather_for_cp, shift_logits, shift_targets


def map_logit_chunks(
    function: Callable[..., Tensor], logits_BSV: Tensor, *per_token: Tensor, temperature: float, chunk_size: int | None
) -> Tensor:
    """`function` of the logits that predict each token, over temperature in float32, and of the token's own values.

    `per_token` and the result are [B, S, ...], of whole rows, and the logits of this context-parallel rank's part;
    position t of the result comes from the logits at t - 1 and from `per_token` at t, and position 0 is 0. `chunk_size`
    positions are computed at a time; None: all at once.
    """
    whole = max(1, logits_BSV.shape[1])
    logits = torch.split(shift_logits(logits_BSV), chunk_size or whole, dim=1)
    others = [torch.split(shift_targets(values), chunk_size or whole, dim=1) for values in per_token]
    of_chunk = partial(_at_temperature, function, temperature)
    if len(logits) > 1 and torch.is_grad_enabled():
        of_chunk = partial(checkpoint, of_chunk, use_reentrant=False, preserve_rng_state=False)
    return gather_for_cp(torch.cat([of_chunk(*chunk) for chunk in zip(logits, *others, strict=True)], dim=1))


def _at_temperature(
    function: Callable[..., Tensor], temperature: float, logits_BSV: Tensor, *per_token: Tensor
) -> Tensor:
    return function(logits_BSV.float() / temperature, *per_token)


def target_logprobs(logits_BSV: Tensor, ids_BS: Tensor) -> Tensor:
    """Log-probability of one token at each position, [B, S]; `ids_BS` int64. Overwrites the logits."""
    logprobs: Tensor = -vocab_parallel_cross_entropy(logits_BSV, ids_BS.contiguous())
    return logprobs


def token_entropy(logits_BSV: Tensor) -> Tensor:
    """Entropy of the distribution over the whole vocabulary, in nats, [B, S]."""
    log_normalizer = copy_to_tensor_model_parallel_region(_log_normalizer(logits_BSV))
    logprobs = logits_BSV - log_normalizer[..., None]
    entropy: Tensor = -reduce_from_tensor_model_parallel_region((logprobs.exp() * logprobs).sum(dim=-1))
    return entropy


def gather_logprobs(logits_BSV: Tensor, ids_BSK: Tensor) -> Tensor:
    """Log-probabilities of the given tokens over the whole vocabulary, [B, S, K]; `ids_BSK` int64."""
    num_local = logits_BSV.shape[-1]
    local_ids = ids_BSK - parallel_state.get_tensor_model_parallel_rank() * num_local
    is_local = (local_ids >= 0) & (local_ids < num_local)
    chosen = logits_BSV.gather(-1, local_ids.clamp(0, num_local - 1)).masked_fill(~is_local, 0)
    logits: Tensor = reduce_from_tensor_model_parallel_region(chosen)
    return logits - _log_normalizer(logits_BSV)[..., None]


def topk_logits(logits_BSV: Tensor, k: int, num_tokens: int) -> tuple[Tensor, Tensor]:
    """The `k` largest logits among the first `num_tokens` of the vocabulary and their ids (int64), [B, S, K] each.

    What follows `num_tokens` is padding of the embedding.
    """
    first = parallel_state.get_tensor_model_parallel_rank() * logits_BSV.shape[-1]
    ids = torch.arange(first, first + logits_BSV.shape[-1], device=logits_BSV.device)
    values, indices = logits_BSV.masked_fill(ids >= num_tokens, -torch.inf).topk(min(k, len(ids)), dim=-1)
    values, indices = _gather(values), _gather(indices + first)
    values, order = values.topk(min(k, values.shape[-1]), dim=-1)
    return values, indices.gather(-1, order)


def topk_logit_chunks(
    logits_BSV: Tensor, k: int, num_tokens: int, *, temperature: float, chunk_size: int | None
) -> tuple[Tensor, Tensor]:
    """`topk_logits` of what predicts each token, as in `map_logit_chunks`, but without a gradient."""
    chunks = torch.split(shift_logits(logits_BSV), chunk_size or max(1, logits_BSV.shape[1]), dim=1)
    parts = [topk_logits(chunk.float() / temperature, k, num_tokens) for chunk in chunks]
    values, ids = (gather_for_cp(torch.cat(each, dim=1)) for each in zip(*parts, strict=True))
    return values, ids


def _gather(values: Tensor) -> Tensor:
    group = parallel_state.get_tensor_model_parallel_group()
    parts = [torch.empty_like(values) for _ in range(group.size())]
    dist.all_gather(parts, values.contiguous(), group=group)
    return torch.cat(parts, dim=-1)


def _log_normalizer(logits_BSV: Tensor) -> Tensor:
    largest = logits_BSV.detach().amax(dim=-1)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=parallel_state.get_tensor_model_parallel_group())
    total = reduce_from_tensor_model_parallel_region((logits_BSV - largest[..., None]).exp().sum(dim=-1))
    log_normalizer: Tensor = total.log() + largest
    return log_normalizer
