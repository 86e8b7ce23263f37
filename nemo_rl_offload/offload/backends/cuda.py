"""A CUDA device: two copy streams, one each way, and pinned slabs.

Why each wait is there:
- a copy out starts after the compute stream's present work: it reads what that work writes;
- a copy out waits for the block's fences: a former owner's reload may still be reading those host bytes;
- a copy in waits for the block's last event, its own copy out: without it, a reload that comes early reads
  bytes that have not arrived;
- a copy in waits for the compute stream *after* its destination was allocated there: the allocator hands out
  memory that compute work already enqueued may still be using.
Destinations come from the compute stream's pool, not the copy stream's: one pool does not fragment against
another, and no `record_stream` is needed, because the engine makes the compute stream wait before the tensor
is used or freed.

Limit: "the compute stream" is the stream that is current when the engine is called. One model, one such
stream.
"""

import warnings

import torch
from torch import Tensor

from nemo_rl_offload.offload.backends.base import Block, Event, HostSlab, Spec, allocate_pageable


class CudaBackend:
    """See `Backend`. `device` is a CUDA device; without an index, the current one."""

    def __init__(self, device: torch.device | str = "cuda") -> None:
        device = torch.device(device)
        assert device.type == "cuda"
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self._out_stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._in_stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._pin = True

    def allocate_host(self, num_bytes: int) -> HostSlab:
        if self._pin:
            try:
                data = torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
                return HostSlab(data, num_bytes)
            except RuntimeError as error:
                self._pin = False
                warnings.warn(
                    f"The system refused {num_bytes} bytes of pinned memory: {error}. Offloading goes on "
                    "with pageable memory, whose copies do not overlap with compute. Raise the limit of "
                    "locked memory (ulimit -l) or lower the host memory budget.",
                    stacklevel=2,
                )
        return allocate_pageable(num_bytes)

    def copy_out(self, source: Tensor, block: Block) -> Event:
        self._out_stream.wait_stream(self._compute_stream())
        for fence in block.fences:
            self._out_stream.wait_event(_cuda_event(fence))
        with torch.cuda.stream(self._out_stream):
            block.data().copy_(source, non_blocking=True)
        return _record(self._out_stream)

    def copy_in(self, block: Block, like: Spec) -> tuple[Tensor, Event]:
        assert block.last_event is not None
        destination = torch.empty(like.num_bytes, dtype=torch.uint8, device=self.device)
        self._in_stream.wait_stream(self._compute_stream())
        self._in_stream.wait_event(_cuda_event(block.last_event))
        with torch.cuda.stream(self._in_stream):
            destination.copy_(block.data(), non_blocking=True)
        return destination, _record(self._in_stream)

    def compute_wait(self, event: Event) -> None:
        self._compute_stream().wait_event(_cuda_event(event))

    def done(self, event: Event) -> bool:
        return bool(_cuda_event(event).query())  # type: ignore[no-untyped-call]

    def _compute_stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device)


def _record(stream: torch.cuda.Stream) -> Event:
    event: Event = stream.record_event()
    return event


def _cuda_event(event: Event) -> torch.cuda.Event:
    assert isinstance(event, torch.cuda.Event)
    return event
