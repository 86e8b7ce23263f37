"""Log-probabilities and entropy of tokens from hidden states and the output weight, without their logits.

With hidden states h [N, H] and this rank's part of the weight W [V, H], the logits of N tokens are h W^T / temperature.
They exist a block of the vocabulary at a time, for which `block_bytes` are enough: float32, and on the way back their
gradient in the weight's type. The forward pass keeps the logarithm of the sum of exponentials and the chosen logits of
each token. The backward pass makes each block again, and from

    gradient of logit v = sum over chosen k of g_k ([v = id_k] - p_v) - g_entropy p_v (log p_v + entropy)

two products: the block's rows of the weight's gradient, in one over all tokens, and its share of the hidden states'
gradient, summed in float32. One more product than with logits that stay, a third of the head's time at most; there
is less to read and write instead.

Blocks of the vocabulary, not of tokens: the weight's gradient is written once, in its own type, by a product whose
sums are float32, as without blocks. Chunks of tokens would each add to all of it, which takes a float32 copy of the
weight and its traffic for each chunk. They are there for those who set `chunk_tokens`, and where so many tokens would
leave a block too narrow for the device.

An adapter of the output layer adds z B^T to the logits of a block, with z [N, R] made of the hidden states and B [V, R]
split like W (`LowRank`). They are a second pair of factors, with gradients of their own by the same two products.

Over tensor-parallel ranks, each with its part of the vocabulary, only numbers per token are reduced: the largest
logarithm, then the sums relative to it. A rank's part may end with rows that pad the vocabulary; `num_tokens` leaves
them out, in both directions.

Rejected: Liger-Kernel's and quack's fused losses, and Megatron-Core's, compute the gradient of a mean cross-entropy in
the forward pass, where a policy gradient is not known yet; Apple's cut-cross-entropy returns it per token, over a split
vocabulary too, but neither entropy nor several tokens at a position, and CUDA alone.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from nemo_rl_offload.megatron.step.head_kernels import block_gradient, block_statistics
from nemo_rl_offload.specs.output_head import BLOCK_BYTES, block_width, chunk_size


@dataclass(frozen=True)
class Head:
    """How the head is computed."""

    scale: float
    """One over the temperature."""
    num_local: int
    """Entries of the vocabulary on this rank, without padding; its part of the weight begins with them."""
    first: int
    """The first of them."""
    group: dist.ProcessGroup | None
    """Ranks that share the vocabulary; None: there is one."""
    chunk_tokens: int | None = None
    block_bytes: int = BLOCK_BYTES
    by_kernel: bool = False


class LowRank(NamedTuple):
    """What an adapter of the output layer adds to the logits: its inputs times its weight, transposed."""

    inputs: Tensor
    """[N, R], made of the hidden states, scaled; on all ranks the same."""
    weight: Tensor
    """[V, R], this rank's part of the vocabulary."""


class Statistics(NamedTuple):
    """Of each token; float32."""

    chosen: Tensor
    """Logits over temperature of the chosen tokens, [N, K]."""
    largest: Tensor
    """Of all of them, [N]."""
    total: Tensor
    """Sum of the exponentials of all, relative to the largest, [N]."""
    entropy: Tensor | None
    """[N]."""


def linear_logprobs(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    ids_NK: Tensor,
    head: Head,
    *,
    entropy: bool,
    adapter: LowRank | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities of chosen tokens, [N, K], and the entropy, [N], both float32 and in nats.

    Gradients of hidden states, and of an adapter's inputs, are those of this rank's part of the vocabulary; whoever
    calls sums them over ranks.

    Args:
        hidden_NH: float32 or bfloat16, on all ranks the same.
        weight_VH: this rank's part, of the same type.
        ids_NK: int64, in the whole vocabulary; those of a row differ.
        entropy: whether it is wanted.
    """
    apply: Callable[..., tuple[Tensor, Tensor]] = _LinearLogprobs.apply
    chosen, entropies = apply(ids_NK, head, entropy, hidden_NH, weight_VH, *(adapter or ()))
    return chosen, entropies if entropy else None


def linear_topk(
    hidden_NH: Tensor, weight_VH: Tensor, k: int, head: Head, adapter: LowRank | None = None
) -> tuple[Tensor, Tensor]:
    """The largest of this rank's logits over temperature, float32, and their ids in the whole vocabulary, int64.

    [N, K] each with K as on all ranks, at most `k`: the largest first, and -inf where there are no more. Without
    gradients.
    """
    size = min(k, len(weight_VH))
    factors = _pairs(hidden_NH, weight_VH, *(adapter or ()))
    parts = []
    for tokens in _chunks(len(hidden_NH), head):
        values = hidden_NH.new_empty(tokens.stop - tokens.start, 0, dtype=torch.float32)
        ids = torch.empty_like(values, dtype=torch.int64)
        for block in _blocks(tokens.stop - tokens.start, weight_VH.element_size(), head):
            logits_NV = _logits(_of_tokens(factors, tokens), block)
            new_values, new_ids = logits_NV.topk(min(size, logits_NV.shape[1]), dim=-1)
            values = torch.cat([values, new_values], dim=-1)
            ids = torch.cat([ids, new_ids + (head.first + block.start)], dim=-1)
            values, order = values.topk(min(size, values.shape[1]), dim=-1)
            ids = ids.gather(-1, order)
        missing = (0, size - values.shape[1])
        parts.append((F.pad(values * head.scale, missing, value=-torch.inf), F.pad(ids, missing)))
    return torch.cat([values for values, _ in parts]), torch.cat([ids for _, ids in parts])


type _Factors = list[tuple[Tensor, Tensor]]
"""Pairs of inputs [N, I] and a weight [V, I], whose products are summed: the output layer's, and its adapter's."""


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, ids_NK: Tensor, head: Head, wants_entropy: bool, *inputs_and_weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        factors = _pairs(*inputs_and_weights)
        chunks = list(_chunks(len(ids_NK), head))
        parts = [_local_statistics(_of_tokens(factors, each), ids_NK[each], head, wants_entropy) for each in chunks]
        local = Statistics(
            torch.cat([part.chosen for part in parts]),
            torch.cat([part.largest for part in parts]),
            torch.cat([part.total for part in parts]),
            torch.cat([part.entropy for part in parts if part.entropy is not None]) if wants_entropy else None,
        )
        chosen_NK, largest_N, total_N, entropy_N = _over_ranks(local, head.group)
        log_total_N = total_N.log()
        saved_entropy = [] if entropy_N is None else [entropy_N]
        ctx.save_for_backward(ids_NK, largest_N, log_total_N, *inputs_and_weights, *saved_entropy)
        ctx.head = head
        logprobs_NK = (chosen_NK - largest_N[:, None]) - log_total_N[:, None]
        return logprobs_NK, largest_N.new_empty(0) if entropy_N is None else entropy_N

    @staticmethod
    def backward(ctx: Any, of_chosen_NK: Tensor, of_entropy_N: Tensor) -> tuple[Tensor | None, ...]:
        ids_NK, largest_N, log_total_N, *rest = ctx.saved_tensors
        head: Head = ctx.head
        is_wanted = ctx.needs_input_grad[3:]
        entropy_N, of_entropy = (rest.pop(), of_entropy_N) if len(rest) > len(is_wanted) else (None, None)
        factors = _pairs(*rest)
        chunks = list(_chunks(len(ids_NK), head))
        gradients: list[tuple[Tensor | None, Tensor | None]] = []
        for (inputs, weight), (wants_inputs, wants_weight) in zip(factors, _pairs(*is_wanted), strict=True):
            # of a weight, more chunks than one are summed in float32
            dtype = weight.dtype if len(chunks) == 1 else torch.promote_types(weight.dtype, torch.float32)
            of_weight = torch.zeros_like(weight, dtype=dtype) if wants_weight else None
            gradients.append((torch.empty_like(inputs) if wants_inputs else None, of_weight))
        for each in chunks:
            _add_gradients(
                _of_tokens(factors, each),
                [(None if inputs is None else inputs[each], weight) for inputs, weight in gradients],
                ids_NK[each],
                head,
                largest_N[each],
                log_total_N[each],
                of_chosen_NK[each],
                None if entropy_N is None else entropy_N[each],
                None if of_entropy is None else of_entropy[each],
                is_only=len(chunks) == 1,
            )
        found: list[Tensor | None] = [None, None, None]
        for (of_inputs, of_weight), (_, weight) in zip(gradients, factors, strict=True):
            found += [of_inputs, None if of_weight is None else of_weight.to(weight.dtype)]
        return tuple(found)


def _local_statistics(factors: _Factors, ids_NK: Tensor, head: Head, wants_entropy: bool) -> Statistics:
    """Of this rank's part of the vocabulary: chosen logits or 0, the logarithm of its sum, the entropy within it."""
    hidden_NH, weight_VH = factors[0]
    dtype = torch.promote_types(hidden_NH.dtype, torch.float32)
    chosen_NK = hidden_NH.new_zeros(ids_NK.shape, dtype=dtype)
    parts = []
    for block in _blocks(len(hidden_NH), weight_VH.element_size(), head):
        logits_NV = _logits(factors, block)
        parts.append(block_statistics(logits_NV, head.scale, entropy=wants_entropy, by_kernel=head.by_kernel))
        places_NK, is_elsewhere_NK = _places(ids_NK, head, block)
        chosen_NK += (logits_NV.gather(1, places_NK) * head.scale).masked_fill_(is_elsewhere_NK, 0)
    if not parts:  # all of this rank's part is padding
        zeros_N = torch.zeros_like(chosen_NK[:, 0])
        return Statistics(chosen_NK, zeros_N - torch.inf, zeros_N, zeros_N if wants_entropy else None)
    largest_N = torch.stack([part.largest for part in parts]).amax(dim=0)
    totals_BN = torch.stack([part.total * (part.largest - largest_N).exp() for part in parts])
    total_N = totals_BN.sum(dim=0)
    if not wants_entropy:
        return Statistics(chosen_NK, largest_N, total_N, None)
    shares_BN = totals_BN / total_N
    within_BN = torch.stack([part.entropy for part in parts if part.entropy is not None])
    return Statistics(chosen_NK, largest_N, total_N, (shares_BN * within_BN + torch.special.entr(shares_BN)).sum(dim=0))


def _over_ranks(local: Statistics, group: dist.ProcessGroup | None) -> Statistics:
    """Put the parts of the vocabulary together; the entropy is that of the parts and, in their shares, that within."""
    if group is None:
        return local
    chosen_NK, own_largest_N, own_total_N, own_entropy_N = local
    largest_N = own_largest_N.clone()
    dist.all_reduce(largest_N, dist.ReduceOp.MAX, group=group)
    relative_N = own_total_N * (own_largest_N - largest_N).exp()
    within = [] if own_entropy_N is None else [relative_N * own_entropy_N + torch.special.entr(relative_N)]
    sums = torch.cat([chosen_NK, torch.stack([relative_N, *within], dim=1)], dim=1)
    dist.all_reduce(sums, group=group)
    num_ids = chosen_NK.shape[1]
    total_N = sums[:, num_ids]
    entropy_N = sums[:, num_ids + 1] / total_N + total_N.log() if within else None
    return Statistics(sums[:, :num_ids], largest_N, total_N, entropy_N)


def _add_gradients(
    factors: _Factors,
    gradients: list[tuple[Tensor | None, Tensor | None]],
    ids_NK: Tensor,
    head: Head,
    largest_N: Tensor,
    log_total_N: Tensor,
    of_chosen_NK: Tensor,
    entropy_N: Tensor | None,
    of_entropy_N: Tensor | None,
    *,
    is_only: bool,
) -> None:
    """Write a chunk's gradients of inputs, and write or add those of weights."""
    hidden_NH, weight_VH = factors[0]
    of_chosen_NK = of_chosen_NK.to(largest_N.dtype)
    of_first_N, of_sums_N = of_chosen_NK[:, 0].contiguous(), of_chosen_NK.sum(dim=1)
    sums = [None if each is None else torch.zeros_like(each, dtype=largest_N.dtype) for each, _ in gradients]
    for block in _blocks(len(hidden_NH), weight_VH.element_size(), head):
        logits_NV = _logits(factors, block)
        gradient_NV = logits_NV if ids_NK.shape[1] > 1 else torch.empty_like(logits_NV, dtype=weight_VH.dtype)
        block_gradient(
            logits_NV,
            gradient_NV,
            head.scale,
            largest_N,
            log_total_N,
            ids_NK[:, 0] - (head.first + block.start),
            of_first_N,
            of_sums_N,
            entropy_N,
            None if of_entropy_N is None else of_entropy_N.contiguous(),
            by_kernel=head.by_kernel,
        )
        if ids_NK.shape[1] > 1:
            places_NK, is_elsewhere_NK = _places(ids_NK[:, 1:], head, block)
            gradient_NV.scatter_add_(1, places_NK, (of_chosen_NK[:, 1:] * head.scale).masked_fill(is_elsewhere_NK, 0))
            gradient_NV = gradient_NV.to(weight_VH.dtype)
        del logits_NV
        for (inputs_NI, weight_VI), (_, of_weight_VI), sums_NI in zip(factors, gradients, sums, strict=True):
            if of_weight_VI is not None:
                if is_only:
                    torch.mm(gradient_NV.T, inputs_NI, out=of_weight_VI[block])
                else:
                    _add_product(of_weight_VI[block], gradient_NV.T, inputs_NI)
            if sums_NI is not None:
                _add_product(sums_NI, gradient_NV, weight_VI[block])
    for (of_inputs_NI, _), sums_NI in zip(gradients, sums, strict=True):
        if of_inputs_NI is not None and sums_NI is not None:
            of_inputs_NI.copy_(sums_NI)


def _pairs[T](*items: T) -> list[tuple[T, T]]:
    return list(zip(items[::2], items[1::2], strict=True))


def _of_tokens(factors: _Factors, tokens: slice) -> _Factors:
    return [(inputs_NI[tokens], weight_VI) for inputs_NI, weight_VI in factors]


def _chunks(num_tokens: int, head: Head) -> Iterator[slice]:
    size = chunk_size(num_tokens, head.chunk_tokens)
    for start in range(0, max(1, num_tokens), size):  # without tokens one chunk, of none
        yield slice(start, min(start + size, num_tokens))


def _blocks(num_tokens: int, element_bytes: int, head: Head) -> Iterator[slice]:
    """Parts of this rank's vocabulary, whose logits in float32 and their gradient take `block_bytes`."""
    width = block_width(num_tokens, element_bytes, head.block_bytes)
    for start in range(0, head.num_local, width):
        yield slice(start, min(start + width, head.num_local))


def _places(ids_NK: Tensor, head: Head, block: slice) -> tuple[Tensor, Tensor]:
    """Columns of the block that hold these tokens, and which of them are elsewhere, with any column."""
    places_NK = ids_NK - (head.first + block.start)
    size = block.stop - block.start
    return places_NK.clamp(0, size - 1), (places_NK < 0) | (places_NK >= size)


def _logits(factors: _Factors, block: slice) -> Tensor:
    """Of a block of the vocabulary, [N, V], float32."""
    (hidden_NH, weight_VH), *adapter = factors
    logits_NV = _product(hidden_NH, weight_VH[block])
    for inputs_NR, weight_VR in adapter:
        _add_product(logits_NV, inputs_NR, weight_VR[block].T)
    return logits_NV


def _product(hidden_NH: Tensor, weight_VH: Tensor) -> Tensor:
    """Logits [N, V], float32. A device sums and writes those of bfloat16 in float32; elsewhere they are rounded."""
    if hidden_NH.dtype in (torch.float32, torch.float64):
        return hidden_NH @ weight_VH.T
    if hidden_NH.is_cuda:
        return torch.mm(hidden_NH, weight_VH.T, out_dtype=torch.float32)
    return (hidden_NH @ weight_VH.T).float()


def _add_product(sums: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left x right to float32 (or wider) sums, [L, R]; left [L, M], right [M, R]."""
    if left.dtype == sums.dtype:
        sums.addmm_(left, right)
    elif left.is_cuda:
        torch.addmm(sums, left, right, out_dtype=sums.dtype, out=sums)
    else:
        sums.addmm_(left.to(sums.dtype), right.to(sums.dtype))
