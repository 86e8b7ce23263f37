"""Lets a router's result reach the host without waiting behind offloaded activations.

In every layer with experts, Megatron's dispatchers copy to the host how many tokens each expert gets. The host waits
for that, and meanwhile nothing is queued on the device. As a copy, these few bytes stand behind up to 0.6 ms of
offloaded activations in the device's copy engine (`offload/backends/cuda.py`). Here a kernel writes them into pinned
memory instead: it needs no copy engine, and waits for nobody.

Limit: torch's allocator of pinned memory does not know of the kernel. Whoever drops a result before waiting for it
frees memory that the kernel may still write to. Megatron always waits.
"""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.moe import token_dispatcher
from torch import Tensor

_MAX_BYTES = 1 << 20


class _OnDevice:
    """Pinned memory as the device addresses it (`__cuda_array_interface__`), which is where the host does, too."""

    def __init__(self, pinned: Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(pinned.shape),
            "typestr": f"<i{pinned.element_size()}",
            "data": (pinned.data_ptr(), False),
            "version": 2,
        }


def to_host(tensor: Tensor) -> Tensor:
    """A pinned copy of an integer tensor on a CUDA device, complete when the current stream has come this far."""
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    torch.add(tensor, 0, out=torch.as_tensor(_OnDevice(pinned), device=tensor.device))
    return pinned


def bypass_copy_engine(active: bool) -> None:
    """Whether Megatron's dispatchers move their results this way in this process."""
    present = token_dispatcher.maybe_move_tensor_to_cpu
    if active and not isinstance(present, _Move):
        token_dispatcher.maybe_move_tensor_to_cpu = _Move(present)
    elif not active and isinstance(present, _Move):
        token_dispatcher.maybe_move_tensor_to_cpu = present.original


class _Move:
    """Stands for Megatron's `maybe_move_tensor_to_cpu`, and leaves to it what is no small tensor of integers."""

    def __init__(self, original: Callable[..., Any]) -> None:
        self.original = original

    def __call__(self, tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        small = torch.is_tensor(tensor) and tensor.is_cuda and 0 < tensor.nbytes <= _MAX_BYTES
        if not small or tensor.dtype not in (torch.int32, torch.int64):
            return self.original(tensor, as_numpy, record_stream)
        pinned = to_host(tensor)
        if record_stream:
            tensor.record_stream(torch.cuda.current_stream())
        return pinned.numpy() if as_numpy else pinned
