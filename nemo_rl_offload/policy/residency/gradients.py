"""Gradients are on the device only while a worker trains, where memory is handed back between its phases.

They are worth nothing between two steps, so they are freed, not moved: Megatron's buffers of them lose their memory and
get other, which the next step fills with zeros before it adds to it. Their views stay views.

Freed memory goes back to the device at once (`empty_unused_memory_level` 1 and above). In torch's cache a small tensor
that stays could settle in it, and the gradients would not fit there again.
"""

from collections.abc import Iterator

from torch import Tensor

from nemo_rl_offload.megatron.build.model import MegatronModel
from nemo_rl_offload.megatron.protocols import GradientBuffer


def free_gradients(model: MegatronModel) -> None:
    """Free the gradients of a model, and the optimizer's own."""
    if model.optimizer is not None:
        model.optimizer.zero_grad()
        for buffer in _buffers(model):
            buffer.offload_to_cpu(move_params=False, move_grads=True)  # which frees them, and moves nothing


def restore_gradients(model: MegatronModel) -> None:
    """Give gradients memory again, full of zeros."""
    if model.optimizer is not None:
        for buffer in _buffers(model):
            buffer.reload_from_cpu(move_params=False, move_grads=True)


def gradient_tensors(model: MegatronModel) -> list[Tensor]:
    """The buffers of a model's gradients; of freed ones, without memory."""
    return [buffer.grad_data for buffer in _buffers(model)] if model.optimizer is not None else []


def _buffers(model: MegatronModel) -> Iterator[GradientBuffer]:
    """Those whose memory is not the weights' too, as with weights in 8 bits."""
    for chunk in model.chunks:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            if getattr(buffer, "shared_buffer", None) is None:
                yield buffer
