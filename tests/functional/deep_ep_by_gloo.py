"""What DeepEP's two calls do, on the CPU: each token goes once to every rank that has an expert of its."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import all_to_all
from megatron.core.transformer.moe import token_dispatcher
from torch import Tensor

from nemo_rl_offload.megatron.build import transformer_config


def install(patch: pytest.MonkeyPatch) -> None:
    """Let Megatron's flex dispatcher take these in place of DeepEP's, without a GPU."""
    patch.setattr(token_dispatcher, "fused_dispatch", _dispatch)
    patch.setattr(token_dispatcher, "fused_combine", _combine)
    patch.setattr(token_dispatcher, "set_deepep_num_sms", lambda _: None)
    patch.setattr(transformer_config, "check_flex_dispatcher", lambda _: None)


def _dispatch(
    x_TH: Tensor, experts_TK: Tensor, probs_TK: Tensor, num_experts: int, group: Any, **_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Any]:
    """Tokens that come to this rank, their experts here (-1: another rank's) and weights, and the experts' loads."""
    size, rank = group.size(), dist.get_rank(group)
    num_local = num_experts // size
    rows = [(experts_TK // num_local == other).any(dim=1).nonzero()[:, 0] for other in range(size)]
    rows_sent, sent = torch.cat(rows), [len(each) for each in rows]
    counts: list[list[int]] = [[]] * size
    dist.all_gather_object(counts, sent, group=group)
    received = [each[rank] for each in counts]
    experts_RK = experts_TK.new_empty(sum(received), experts_TK.shape[1])
    dist.all_to_all_single(experts_RK, experts_TK[rows_sent].contiguous(), received, sent, group=group)
    local_RK = torch.where(experts_RK // num_local == rank, experts_RK - rank * num_local, -1)
    x_RH = all_to_all(group, x_TH[rows_sent], received, sent)
    probs_RK = all_to_all(group, probs_TK[rows_sent], received, sent).masked_fill(local_RK < 0, 0)
    loads = torch.bincount(local_RK[local_RK >= 0], minlength=num_local)
    return x_RH, local_RK, probs_RK, loads, (rows_sent, sent, received, len(x_TH))


def _combine(x_RH: Tensor, group: Any, handle: Any, **_: Any) -> tuple[Tensor, None]:
    rows_sent, sent, received, num_tokens = handle
    back = all_to_all(group, x_RH, sent, received)
    return back.new_zeros(num_tokens, back.shape[1]).index_add(0, rows_sent, back), None
