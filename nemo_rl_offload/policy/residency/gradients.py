"""Gradients are on the device only while a worker trains, where memory is handed back between its phases.

Freed memory goes back to the device at once (`empty_unused_memory_level` 1 and above). In torch's cache a small tensor
that stays could settle in it, and the gradients would not fit there again.
"""

from torch import Tensor

from nemo_rl_offload.megatron.build.gradient_memory import free_buffers, own_buffers, restore_buffers
from nemo_rl_offload.megatron.build.model import MegatronModel


def free_gradients(model: MegatronModel) -> None:
    """Free the gradients of a model, and the optimizer's own."""
    if model.optimizer is not None:
        model.optimizer.zero_grad()
        free_buffers(model.chunks)


def restore_gradients(model: MegatronModel) -> None:
    """Give gradients memory again, full of zeros."""
    if model.optimizer is not None:
        restore_buffers(model.chunks)


def gradient_tensors(model: MegatronModel) -> list[Tensor]:
    """The buffers of a model's gradients; of freed ones, without memory."""
    return [buffer.grad_data for buffer in own_buffers(model.chunks)] if model.optimizer is not None else []
