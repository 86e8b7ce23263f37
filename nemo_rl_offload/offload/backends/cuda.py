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

Copies are cut into pieces, and between two of them the copy stream waits for a few bytes that another stream copies the
same way. A device has one copy engine each way, which stays with a stream as long as that has copies ready: the few
bytes of a routing result that a layer waits for stood 17 ms behind a gibibyte, in whatever pieces it was copied (H200;
0.6 ms now, at 97 % of the link's rate). The calls go to the driver (`cuda_driver`).

Limit: "the compute stream" is the stream that is current when the engine is called. One model, one such
stream.
"""

import warnings
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, UntypedStorage

from nemo_rl_offload.offload.backends.base import Block, Event, HostSlab, allocate_pageable
from nemo_rl_offload.offload.backends.cuda_driver import cuda_driver

MAX_PIECE_OUT_BYTES = 32 << 20
MAX_PIECE_BYTES = 128 << 20  # layers hardly wait for small copies from the host


class _Lane:
    """A stream of copies one way, which lets copies of other streams pass between two pieces."""

    def __init__(self, device: torch.device, max_piece_bytes: int, *, out: bool) -> None:
        self._driver, self._device_index = cuda_driver(), device.index
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._other = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._events = [torch.cuda.Event() for _ in range(3)]  # type: ignore[no-untyped-call]
        for event in self._events:
            event.record(self.stream)  # which makes it; before that it has no handle
        self._computed, before, after = self._events
        self._before, self._after = before.cuda_event, after.cuda_event
        ends = [torch.zeros(1, device=device), torch.zeros(1, device="cpu", pin_memory=True)]
        self._ends = ends if out else ends[::-1]
        ends[0].record_stream(self._other)  # both may be dropped under the last of the driver's copies
        with torch.cuda.stream(self._other):
            ends[1].copy_(ends[0], non_blocking=True)
        self._max_piece_bytes = self._left_bytes = max_piece_bytes  # left: of the present piece

    def after(self, compute: torch.cuda.Stream, events: Iterable[Event]) -> None:
        """What follows on the lane's stream follows the compute stream's present work and `events`."""
        self._computed.record(compute)
        self.stream.wait_event(self._computed)
        for event in events:
            self.stream.wait_event(_cuda_event(event))

    def copy(self, destination: int, source: int, num_bytes: int) -> None:
        """Copy bytes from one address to another."""
        if torch.cuda.current_device() != self._device_index:
            with torch.cuda.device(self._device_index):
                self.copy(destination, source, num_bytes)
            return
        while num_bytes:
            size = min(num_bytes, self._left_bytes)
            self._driver.copy(destination, source, size, self.stream.cuda_stream)
            destination, source, num_bytes = destination + size, source + size, num_bytes - size
            self._left_bytes -= size
            if not self._left_bytes:
                self._let_pass()

    def _let_pass(self) -> None:
        self._left_bytes = self._max_piece_bytes
        driver, own, other = self._driver, self.stream.cuda_stream, self._other.cuda_stream
        source, destination = self._ends
        driver.record(self._before, own)
        driver.wait(other, self._before)
        driver.copy(destination.data_ptr(), source.data_ptr(), source.nbytes, other)
        driver.record(self._after, other)
        driver.wait(own, self._after)


class CudaBackend:
    """See `Backend`. `device` is a CUDA device; without an index, the current one.

    A small copy to the host waits for at most `max_piece_out_bytes` on the link. A piece takes the host 17 us
    under the profiler (H200).
    """

    def __init__(self, device: torch.device | str = "cuda", *, max_piece_out_bytes: int = MAX_PIECE_OUT_BYTES) -> None:
        device = torch.device(device)
        assert device.type == "cuda"
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self._out = _Lane(self.device, max_piece_out_bytes, out=True)
        self._in = _Lane(self.device, MAX_PIECE_BYTES, out=False)
        self._pin = True

    def allocate_host(self, num_bytes: int) -> HostSlab:
        if self._pin:
            try:
                data = torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
                self._announce(data)
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

    def copy_out(self, moves: Sequence[tuple[UntypedStorage, Block]]) -> Event:
        self._out.after(self._compute_stream(), dict.fromkeys(fence for _, block in moves for fence in block.fences))
        for source, block in moves:
            address = source.data_ptr()
            for host_address, num_bytes in block.parts:
                self._out.copy(host_address, address, num_bytes)
                address += num_bytes
        return _record(self._out.stream)

    def copy_in(self, blocks: Sequence[Block]) -> tuple[list[Tensor], Event]:
        device = self.device
        destinations = [torch.empty(block.num_bytes, dtype=torch.uint8, device=device) for block in blocks]
        self._in.after(self._compute_stream(), dict.fromkeys(block.last_event for block in blocks))
        for destination, block in zip(destinations, blocks, strict=True):
            address = destination.data_ptr()
            for host_address, num_bytes in block.parts:
                self._in.copy(address, host_address, num_bytes)
                address += num_bytes
        return destinations, _record(self._in.stream)

    def compute_wait(self, event: Event) -> None:
        self._compute_stream().wait_event(_cuda_event(event))

    def done(self, event: Event) -> bool:
        return bool(_cuda_event(event).query())  # type: ignore[no-untyped-call]

    def mark(self) -> Event | None:
        return _record(self._compute_stream())

    def elapsed_ms(self, start: Event, end: Event) -> float:
        return float(_cuda_event(start).elapsed_time(_cuda_event(end)))

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def take_peak_bytes(self) -> int | None:
        """Resets the allocator's peak, which everybody who asks for it shares."""
        peak_bytes = torch.cuda.max_memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        return peak_bytes

    def _announce(self, pinned: Tensor) -> None:
        """Tell torch's allocator which streams use this memory: it gives it to nobody else before they are done."""
        for lane in (self._out, self._in):
            with torch.cuda.stream(lane.stream):
                torch.empty(1, dtype=torch.uint8, device=self.device).copy_(pinned[:1], non_blocking=True)

    def _compute_stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device)


def _record(stream: torch.cuda.Stream) -> Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


def _cuda_event(event: Event) -> torch.cuda.Event:
    assert isinstance(event, torch.cuda.Event)
    return event
