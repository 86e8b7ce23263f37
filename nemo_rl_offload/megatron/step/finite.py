"""Whether an optimizer step may be taken: one value that is no number would reach every weight through the norm."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_rl_offload.megatron.build.model import MegatronModel
from nemo_rl_offload.megatron.protocols import GradientBuffer, ModelChunk


def all_finite(model: MegatronModel, outputs: Sequence[Mapping[str, Tensor]]) -> bool:
    """Whether losses and gradients are finite on all ranks, which all learn the same answer.

    Gradients are looked at where they were accumulated and reduced, in Megatron's buffers: their extremes need no
    second buffer, and an undefined value is an extreme.
    """
    buffers = [buffer.grad_data for chunk in model.chunks for buffer in _buffers(chunk)]
    extremes = [extreme for data in buffers if data.numel() for extreme in torch.aminmax(data)]
    values = torch.stack([*(value.float() for value in extremes), *(output["loss"].float() for output in outputs)])
    is_finite = values.isfinite().all().float()
    dist.all_reduce(is_finite, op=dist.ReduceOp.MIN)
    return bool(is_finite)


def _buffers(chunk: ModelChunk) -> list[GradientBuffer]:
    return [*chunk.buffers, *chunk.expert_parallel_buffers]
