"""The output head of a microbatch: log-probabilities, entropy and top-k of what the model has computed.

Whoever trains or scores asks an `OutputHead` and never sees logits, which are among the largest tensors of a step. A
`HeadFactory` is the other half of the seam: it says what the model's forward shall return for the head, and makes a
head of it for each microbatch. Both are all that an implementation consists of. `fused_head` has the one that makes no
logits; here is the other.

`LogitsHead` takes the model's logits, whose vocabulary is split over tensor-parallel ranks and is never gathered. A
rank holds [B, S, vocabulary / TP]; every result is the same on all of its tensor-parallel group. Gradients follow
Megatron's pair of regions: what is summed over ranks passes its gradient on as it is, and what every rank uses on its
own part of the vocabulary sums the gradients of all. Each function of logits makes float32 copies of them.
`map_logit_chunks` cuts the sequence into chunks, and computes a chunk's copies again in the backward pass instead of
keeping them; the logits themselves, and their gradient, stay whole.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

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

from nemo_rl_offload.batching.packing import PackPart
from nemo_rl_offload.megatron.step.context_parallel import gather_for_cp, shift_logits, shift_targets
from nemo_rl_offload.megatron.step.microbatches import Microbatch
from nemo_rl_offload.megatron.step.mtp_loss import install_mtp_loss


class Prediction(NamedTuple):
    """What the model gives to each token of a microbatch's rows, given the tokens before it; float32, in nats.

    Position t holds what belongs to token t, and position 0 is 0. With gradients where torch records them.
    """

    logprobs: Tensor
    """Of one token at each position, [B, S]."""
    further_logprobs: Tensor | None
    """Of several at each position, [B, S, K]."""
    entropy: Tensor | None
    """Of the distribution over the whole vocabulary, [B, S]."""


class OutputHead(Protocol):
    """What the model predicts for the tokens of one microbatch, at one temperature.

    Ids and results are of the microbatch's rows, [B, S, ...], whatever shape the model takes them in and however ranks
    share it.
    """

    def predict(self, ids_BS: Tensor, further_ids_BSK: Tensor | None = None, *, entropy: bool = False) -> Prediction:
        """Log-probabilities of these tokens, int64, over the whole vocabulary, and what else is asked for, at once."""

    def topk(self, k: int, num_tokens: int) -> tuple[Tensor, Tensor]:
        """The `k` largest logits, over temperature, among the first `num_tokens` of the vocabulary and their ids
        (int64), [B, S, K] each; without a gradient."""


class HeadFactory(Protocol):
    """Makes the head of each microbatch of a pass over a batch."""

    @property
    def forward_kwargs(self) -> Mapping[str, object]:
        """What the model's forward is told besides its inputs, so that its last pipeline stage returns what `build`
        takes. Megatron's `GPTModel` hands hidden states and output weight to an `output_processor` in place of its
        own output layer. Its wrapper for 16 bits makes what comes out float32, also tensors in a tuple; any other
        object passes it as it is."""

    def build(self, output: Any, microbatch: Microbatch) -> OutputHead:
        """The head of one microbatch; `output` is what the last stage's forward returned, told by `forward_kwargs`."""


@dataclass(frozen=True)
class LogitsHeadFactory:
    """Heads from the model's own logits."""

    temperature: float
    chunk_size: int | None = None
    """Positions of a row that are computed at a time; None: all."""

    def __post_init__(self) -> None:
        install_mtp_loss()

    @property
    def forward_kwargs(self) -> Mapping[str, object]:
        """Logits stay split over tensor-parallel ranks."""
        return {"runtime_gather_output": False}

    def build(self, output: Tensor, microbatch: Microbatch) -> "LogitsHead":
        """The head of the logits `output`, [b, s, vocabulary / TP]."""
        return LogitsHead(output, microbatch, self.temperature, self.chunk_size)


class LogitsHead:
    """An `OutputHead` of logits [b, s, vocabulary / TP] in the model's shape, of this context-parallel rank's part."""

    def __init__(
        self, logits_BSV: Tensor, microbatch: Microbatch, temperature: float, chunk_size: int | None = None
    ) -> None:
        self._logits_BSV, self._microbatch = logits_BSV, microbatch
        self._temperature, self._chunk_size = temperature, chunk_size

    def predict(self, ids_BS: Tensor, further_ids_BSK: Tensor | None = None, *, entropy: bool = False) -> Prediction:
        """See `OutputHead`. A loss sums gradients in the order of these three: keep it, for the same bits."""
        return Prediction(
            entropy=self._map(token_entropy) if entropy else None,
            further_logprobs=None
            if further_ids_BSK is None
            else self._map(gather_logprobs, self._microbatch.for_model(further_ids_BSK)),
            logprobs=self._map(token_logprobs, self._microbatch.for_model(ids_BS)),
        )

    def topk(self, k: int, num_tokens: int) -> tuple[Tensor, Tensor]:
        """See `OutputHead`."""
        shifted_BSV = shift_logits(self._logits_BSV)
        chunks = torch.split(shifted_BSV, self._chunk_size or max(1, self._logits_BSV.shape[1]), dim=1)
        parts = [topk_logits(chunk.float() / self._temperature, k, num_tokens) for chunk in chunks]
        values, ids = (
            gather_for_cp(torch.cat(each, dim=1), self._microbatch.part) for each in zip(*parts, strict=True)
        )
        return self._microbatch.for_loss(values), self._microbatch.for_loss(ids)

    def _map(self, function: Callable[..., Tensor], *per_token: Tensor) -> Tensor:
        """`function` over chunks; `per_token` in the model's shape, the result [B, S, ...] in the microbatch's."""
        mapped = map_logit_chunks(
            function,
            self._logits_BSV,
            *per_token,
            temperature=self._temperature,
            chunk_size=self._chunk_size,
            part=self._microbatch.part,
        )
        return self._microbatch.for_loss(mapped)


def map_logit_chunks(
    function: Callable[..., Tensor],
    logits_BSV: Tensor,
    *per_token: Tensor,
    temperature: float,
    chunk_size: int | None,
    part: PackPart | None = None,
) -> Tensor:
    """`function` of the logits that predict each token, over temperature in float32, and of the token's own values.

    `per_token` and the result are [B, S, ...], of whole rows, and the logits of this context-parallel rank's part;
    position t of the result comes from the logits at t - 1 and from `per_token` at t, and position 0 is 0. `chunk_size`
    positions are computed at a time; None: all at once. `part`: what this rank holds of a pack, where ranks share it.
    """
    whole = max(1, logits_BSV.shape[1])
    logits = torch.split(shift_logits(logits_BSV), chunk_size or whole, dim=1)
    others = [torch.split(shift_targets(values, part), chunk_size or whole, dim=1) for values in per_token]
    of_chunk = partial(_at_temperature, function, temperature)
    if len(logits) > 1 and torch.is_grad_enabled():
        of_chunk = partial(checkpoint, of_chunk, use_reentrant=False, preserve_rng_state=False)
    return gather_for_cp(torch.cat([of_chunk(*chunk) for chunk in zip(logits, *others, strict=True)], dim=1), part)


def _at_temperature(
    function: Callable[..., Tensor], temperature: float, logits_BSV: Tensor, *per_token: Tensor
) -> Tensor:
    """`function` of one chunk; `per_token` [B, S, ...]."""
    return function(logits_BSV.float() / temperature, *per_token)


def token_logprobs(logits_BSV: Tensor, ids_BS: Tensor) -> Tensor:
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
    return merge_topk(values, indices + first, k)


def merge_topk(values: Tensor, ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The `k` largest of all tensor-parallel ranks' values [..., K] and their ids; as many from each."""
    values, ids = _gather(values), _gather(ids)
    values, order = values.topk(min(k, values.shape[-1]), dim=-1)
    return values, ids.gather(-1, order)


def _gather(values: Tensor) -> Tensor:
    """All tensor-parallel ranks' values, [..., TP * K]."""
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
