"""What the head makes of a block of logits, [N, V] float32 with a row for each token, in one pass over it.

Plain operators read and write the block several times: for its maximum, the exponentials and their sum, and once for
each term of the gradient. On a device these are two Triton kernels, one program a row, whose only large traffic is the
block itself. Elsewhere plain operators do the same; they are the kernels' test as well.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 4096
_WARPS = 8


def _statistics(logits, largests, totals, entropies, width, stride, scale, TILE: tl.constexpr, ENTROPY: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, TILE)
    largest = tl.full((), -float("inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    weighted = tl.zeros((), tl.float32)
    start = 0
    while start < width:
        inside = start + columns < width
        values = tl.load(logits + row * stride + start + columns, mask=inside, other=-float("inf")) * scale
        new_largest = tl.maximum(largest, tl.max(values))
        shrunk = tl.exp(largest - new_largest)
        exponentials = tl.exp(values - new_largest)
        if ENTROPY:
            lower = tl.where(total > 0, total * shrunk * (new_largest - largest), 0.0)
            below = tl.sum(tl.where(inside, exponentials * (new_largest - values), 0.0))
            weighted = weighted * shrunk + lower + below
        total = total * shrunk + tl.sum(exponentials)
        largest = new_largest
        start += TILE
    tl.store(largests + row, largest)
    tl.store(totals + row, total)
    if ENTROPY:
        tl.store(entropies + row, tl.log(total) + weighted / total)


def _gradient(  # type: ignore[no-untyped-def]
    logits,
    out,
    largests,
    log_totals,
    ids,
    of_ids,
    of_sums,
    entropies,
    of_entropies,
    width,
    stride,
    out_stride,
    scale,
    TILE: tl.constexpr,
    ENTROPY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, TILE)
    largest, log_total, chosen = tl.load(largests + row), tl.load(log_totals + row), tl.load(ids + row)
    of_id, of_sum = tl.load(of_ids + row), tl.load(of_sums + row)
    if ENTROPY:
        entropy, of_entropy = tl.load(entropies + row), tl.load(of_entropies + row)
    start = 0
    while start < width:
        place = start + columns
        inside = place < width
        values = tl.load(logits + row * stride + place, mask=inside, other=0.0) * scale
        logprobs = (values - largest) - log_total
        factor = of_sum
        if ENTROPY:
            factor = of_sum + of_entropy * (logprobs + entropy)
        values = (tl.where(place == chosen, of_id, 0.0) - tl.exp(logprobs) * factor) * scale
        tl.store(out + row * out_stride + place, values.to(out.dtype.element_ty), mask=inside)
        start += TILE


_kernel = cache(triton.jit)


def _tile(width: int) -> int:
    return min(_TILE, int(triton.next_power_of_2(width)))


class BlockStatistics(NamedTuple):
    """Of `scale` x logits of a block, for each row; [N], float32."""

    largest: Tensor
    total: Tensor
    """Sum of the exponentials, each relative to the largest: differences of large numbers would be less exact."""
    entropy: Tensor | None
    """Of the block's own softmax: log total + sum p (largest - logit), whose terms are positive."""


def block_statistics(logits_NV: Tensor, scale: float, *, entropy: bool, by_kernel: bool) -> BlockStatistics:
    """See `BlockStatistics`; the entropy where it is asked for."""
    if not by_kernel:
        scaled_NV = logits_NV * scale
        largest_N = scaled_NV.amax(dim=-1)
        below_NV = scaled_NV - largest_N[:, None]
        exponentials_NV = below_NV.exp()
        total_N = exponentials_NV.sum(dim=-1)
        if not entropy:
            return BlockStatistics(largest_N, total_N, None)
        return BlockStatistics(largest_N, total_N, total_N.log() - exponentials_NV.mul_(below_NV).sum(dim=-1) / total_N)
    num_rows, width = logits_NV.shape
    largest_N = torch.empty(num_rows, dtype=torch.float32, device=logits_NV.device)
    total_N = torch.empty_like(largest_N)
    entropy_N = torch.empty_like(largest_N) if entropy else None
    _kernel(_statistics)[(num_rows,)](
        logits_NV,
        largest_N,
        total_N,
        total_N if entropy_N is None else entropy_N,
        width,
        logits_NV.stride(0),
        scale,
        TILE=_tile(width),
        ENTROPY=entropy,
        num_warps=_WARPS,
    )
    return BlockStatistics(largest_N, total_N, entropy_N)


def block_gradient(
    logits_NV: Tensor,
    out_NV: Tensor,
    scale: float,
    largest_N: Tensor,
    log_total_N: Tensor,
    ids_N: Tensor,
    of_ids_N: Tensor,
    of_sums_N: Tensor,
    entropy_N: Tensor | None,
    of_entropy_N: Tensor | None,
    *,
    by_kernel: bool,
) -> None:
    """The gradient of what was made of `scale` x logits, written to `out_NV`, which may be the logits themselves.

    With p the softmax, log p = scale x logit - `largest_N` - `log_total_N`, that is
    scale x (of_ids at `ids_N` - p (of_sums + of_entropy (log p + entropy))). `ids_N` int64 are columns of the block;
    what is none of them, such as -1, is elsewhere. All but `out_NV` float32.
    """
    if not by_kernel:
        logprobs_NV = (logits_NV * scale - largest_N[:, None]) - log_total_N[:, None]
        factor_NV = of_sums_N[:, None]
        if entropy_N is not None and of_entropy_N is not None:
            factor_NV = factor_NV + of_entropy_N[:, None] * (logprobs_NV + entropy_N[:, None])
        values_NV = -logprobs_NV.exp_() * factor_NV
        inside_N = (ids_N >= 0) & (ids_N < logits_NV.shape[1])
        places_N1 = ids_N.clamp(0, logits_NV.shape[1] - 1)[:, None]
        values_NV.scatter_add_(1, places_N1, of_ids_N.masked_fill(~inside_N, 0)[:, None].to(values_NV.dtype))
        out_NV.copy_(values_NV.mul_(scale))
        return
    num_rows, width = logits_NV.shape
    _kernel(_gradient)[(num_rows,)](
        logits_NV,
        out_NV,
        largest_N,
        log_total_N,
        ids_N,
        of_ids_N,
        of_sums_N,
        largest_N if entropy_N is None else entropy_N,
        largest_N if of_entropy_N is None else of_entropy_N,
        width,
        logits_NV.stride(0),
        out_NV.stride(0),
        scale,
        TILE=_tile(width),
        ENTROPY=entropy_N is not None and of_entropy_N is not None,
        num_warps=_WARPS,
    )
