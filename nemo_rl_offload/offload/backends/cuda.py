"""A CUDA device: two lanes of copies, one each way, and pinned slabs.

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

Copies are cut into pieces, which two streams take in turn, each waiting for the one before. A device has one copy
engine each way, which stays with a stream as long as that has copies ready: the few bytes of a routing result that a
layer waits for stood 17 ms behind a gibibyte on one stream, in whatever pieces it was copied (H200; 0.6 ms now, at
99 % of the link's rate). One stream that waits between two pieces for a few bytes on another does the same, for twice
the calls. The calls go to the driver (`cuda_driver`), and events are used again.

Limit: "the compute stream" is the stream that is current when the engine is called. One model, one such
stream.
"""

import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import wraps
from typing import Concatenate

import torch
from torch import Tensor, UntypedStorage

from nemo_rl_offload.offload.backends.base import Block, Event, HostSlab, allocate_pageable
from nemo_rl_offload.offload.backends.cuda_driver import cuda_driver
from nemo_rl_offload.offload.overlap import FRAGMENTATION

MAX_PIECE_OUT_BYTES = 32 << 20
MAX_PIECE_BYTES = 128 << 20  # layers hardly wait for small copies from the host


class _Handles(list[int]):
    """The driver's events that nobody uses at the moment. It lives as long as one that is used."""

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():
            for handle in self:
                with suppress(RuntimeError):  # the device's context is gone, and this with it
                    cuda_driver().destroy(handle)


class _Event:
    """A point in a stream, as it was when this was made. Its handle is used again when nobody holds it: what waits for
    it on the device waits for the point that it had when the wait was given."""

    __slots__ = ("_unused", "handle")

    def __init__(self, unused: _Handles, stream: int) -> None:
        driver = cuda_driver()
        self._unused = unused
        try:
            self.handle = unused.pop()
        except IndexError:
            self.handle = driver.create()
        driver.record(self.handle, stream)

    def __del__(self) -> None:
        self._unused.append(self.handle)


class _Lane:
    """Copies one way, in order, given to two streams in turn, which lets copies of other streams pass between two
    pieces. Its calls need the device's context to be current."""

    def __init__(self, device: torch.device, max_piece_bytes: int) -> None:
        self._driver = cuda_driver()
        self.streams = [torch.cuda.Stream(device) for _ in range(2)]  # type: ignore[no-untyped-call]
        self.handle, self._next = (stream.cuda_stream for stream in self.streams)
        self._events = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]
        for event in self._events:
            event.record(self.streams[0])  # which makes it; before that it has no handle
        self._computed, self._before = (event.cuda_event for event in self._events)
        self._max_piece_bytes = self._left_bytes = max_piece_bytes  # left: of the present piece

    def after(self, compute_stream: int, events: Iterable[Event]) -> None:
        """What follows on the lane follows the compute stream's present work and `events`."""
        self._driver.record(self._computed, compute_stream)
        self._driver.wait(self.handle, self._computed)
        for event in events:
            self._driver.wait(self.handle, _handle(event))

    def copy(self, destination: int, source: int, num_bytes: int) -> None:
        """Copy bytes from one address to another."""
        while num_bytes:
            size = min(num_bytes, self._left_bytes)
            self._driver.copy(destination, source, size, self.handle)
            destination, source, num_bytes = destination + size, source + size, num_bytes - size
            self._left_bytes -= size
            if not self._left_bytes:
                self._let_pass()

    def _let_pass(self) -> None:
        self._left_bytes = self._max_piece_bytes
        self._driver.record(self._before, self.handle)
        self.handle, self._next = self._next, self.handle
        self._driver.wait(self.handle, self._before)


def _on_device[**P, R](
    method: Callable[Concatenate["CudaBackend", P], R],
) -> Callable[Concatenate["CudaBackend", P], R]:
    """Call with the device's context current. A thread has one from torch's first call to the device in it."""

    @wraps(method)
    def on_device(self: "CudaBackend", /, *args: P.args, **kwargs: P.kwargs) -> R:
        if not hasattr(self._threads, "has_context"):
            with torch.cuda.device(self.device):
                torch.cuda.Event().record()  # type: ignore[no-untyped-call]
            self._threads.has_context = True
        if torch._C._cuda_getDevice() == self._index:
            return method(self, *args, **kwargs)
        with torch.cuda.device(self.device):
            return method(self, *args, **kwargs)

    return on_device


class CudaBackend:
    """See `Backend`. `device` is a CUDA device; without an index, the current one.

    A small copy to the host waits for at most `max_piece_out_bytes` on the link. A piece takes the host 6 us (H200).
    """

    def __init__(self, device: torch.device | str = "cuda", *, max_piece_out_bytes: int = MAX_PIECE_OUT_BYTES) -> None:
        device = torch.device(device)
        assert device.type == "cuda"
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", self._index)
        self._threads = threading.local()
        self._driver, self._unused = cuda_driver(), _Handles()
        with torch.cuda.device(self.device):
            self._out = _Lane(self.device, max_piece_out_bytes)
            self._in = _Lane(self.device, MAX_PIECE_BYTES)
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

    @_on_device
    def copy_out(self, moves: Sequence[tuple[UntypedStorage, Block]]) -> Event:
        self._out.after(self._compute_stream(), dict.fromkeys(fence for _, block in moves for fence in block.fences))
        for source, block in moves:
            address = source.data_ptr()
            for host_address, num_bytes in block.parts:
                self._out.copy(host_address, address, num_bytes)
                address += num_bytes
        return _Event(self._unused, self._out.handle)

    @_on_device
    def copy_in(
        self, blocks: Sequence[Block], started: list[torch.UntypedStorage | Tensor]
    ) -> tuple[list[Tensor], Event]:
        device = self.device
        destinations = [torch.empty(block.num_bytes, dtype=torch.uint8, device=device) for block in blocks]
        started += destinations
        events = (block.last_event for block in blocks if block.last_event is not None)
        self._in.after(self._compute_stream(), dict.fromkeys(events))
        for destination, block in zip(destinations, blocks, strict=True):
            address = destination.data_ptr()
            for host_address, num_bytes in block.parts:
                self._in.copy(address, host_address, num_bytes)
                address += num_bytes
        return destinations, _Event(self._unused, self._in.handle)

    @_on_device
    def compute_wait(self, event: Event) -> None:
        self._driver.wait(self._compute_stream(), _handle(event))

    @_on_device
    def done(self, event: Event) -> bool:
        return self._driver.passed(_handle(event))

    @_on_device
    def mark(self) -> Event | None:
        return _Event(self._unused, self._compute_stream())

    @_on_device
    def elapsed_ms(self, start: Event, end: Event) -> float:
        return self._driver.elapsed_ms(_handle(start), _handle(end))

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def reset_peak(self) -> None:
        """Of torch's allocator, which everybody shares who asks for it."""
        torch.cuda.reset_peak_memory_stats(self.device)

    def peak_bytes(self) -> int | None:
        return torch.cuda.max_memory_allocated(self.device)

    def unused_bytes(self) -> int | None:
        """What torch's allocator keeps beside tensors counts as unused, but for `FRAGMENTATION`. 0 where torch does
        without an allocator, and counts nothing."""
        free_bytes, device_bytes = torch.cuda.mem_get_info(self.device)
        stats = torch.cuda.memory_stats(self.device)
        kept_bytes, peak_bytes = int(stats["reserved_bytes.all.current"]), int(stats["allocated_bytes.all.peak"])
        return free_bytes + kept_bytes - peak_bytes - int(device_bytes * FRAGMENTATION) if peak_bytes else 0

    def _announce(self, pinned: Tensor) -> None:
        """Tell torch's allocator which streams use this memory: it gives it to nobody else before they are done."""
        for stream in (*self._out.streams, *self._in.streams):
            with torch.cuda.stream(stream):
                torch.empty(1, dtype=torch.uint8, device=self.device).copy_(pinned[:1], non_blocking=True)

    def _compute_stream(self) -> int:
        return torch._C._cuda_getCurrentRawStream(self._index)


def _handle(event: Event) -> int:
    assert type(event) is _Event
    return event.handle
