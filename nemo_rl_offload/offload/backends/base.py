"""What the engine asks of a device: host memory, copies both ways, and events that order and time them."""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, UntypedStorage

type Event = Hashable
"""A point in a stream of device work. Opaque: only the backend that made it reads it. Of a copy that has ended when it
returns there may be none: then nothing has to wait for it."""


@dataclass(frozen=True, slots=True, eq=False)
class HostSlab:
    """One allocation of host memory: `data` is a one-dimensional uint8 CPU tensor of `num_bytes`."""

    data: Tensor
    num_bytes: int


class Extent(NamedTuple):
    """`num_bytes` of a slab from `offset` on; `number` is the slab's in its arena."""

    slab: HostSlab
    number: int
    offset: int
    num_bytes: int


class Block:
    """Host memory for the `num_bytes` of one storage: one piece of a slab, or several.

    `fences` are the copies of former owners that may still touch these bytes: a first write waits for them.
    `last_event` is this owner's latest copy, out or in: whatever touches the bytes next waits for it.
    """

    __slots__ = ("fences", "last_event", "num_bytes", "parts", "pieces", "reserved_bytes")

    def __init__(self, pieces: tuple[Extent, ...], num_bytes: int, fences: tuple[Event, ...] = ()) -> None:
        self.pieces = pieces
        self.num_bytes = num_bytes
        self.reserved_bytes = sum([piece.num_bytes for piece in pieces])  # what the arena's alignment makes of it
        self.fences = fences
        self.last_event: Event | None = None
        self.parts: list[tuple[int, int]] = []  # address of each piece, and how many of `num_bytes` it holds
        remaining = num_bytes
        for slab, _, offset, size in pieces:
            self.parts.append((slab.data.data_ptr() + offset, min(size, remaining)))
            remaining -= size

    def views(self, device_bytes: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
        """(piece on the host, its part of `device_bytes`), both one-dimensional uint8 of the same length."""
        sizes = [num_bytes for _, num_bytes in self.parts]
        hosts = [slab.data[offset:][:size] for (slab, _, offset, _), size in zip(self.pieces, sizes, strict=True)]
        return zip(hosts, device_bytes.split_with_sizes(sizes), strict=True)


class Backend(Protocol):
    """One device. Every copy is asynchronous; the event it returns completes when the bytes have arrived. Copies one
    way end in the order in which they were started."""

    @property
    def device(self) -> torch.device: ...

    def allocate_host(self, num_bytes: int) -> HostSlab:
        """Host memory; raises MemoryError when the system refuses."""

    def copy_out(self, moves: Sequence[tuple[UntypedStorage, Block]]) -> Event:
        """Copy storages on the device into their blocks, one after another, after the work that the compute stream
        holds now and after the blocks' fences. The caller keeps the storages alive until the event is done, which is
        one for all: the host's time for more is worth more than what goes a little sooner."""

    def copy_in(
        self, blocks: Sequence[Block], started: list[torch.UntypedStorage | Tensor]
    ) -> tuple[list[Tensor], Event]:
        """Copy each block, one after another, into a new device tensor (uint8, of its `num_bytes`) from the compute
        stream's pool, after the blocks' `last_event`s; what the host itself has written has none. The event is one for
        all; the caller lets the compute stream wait for it before it reads, or frees, any of them. They are put into
        `started` before the first copy begins."""

    def compute_wait(self, event: Event) -> None:
        """Let the compute stream wait for `event`; the host goes on."""

    def done(self, event: Event) -> bool:
        """Whether `event` has completed; never waits."""

    def mark(self) -> Event | None:
        """The compute stream's present point; None on a device whose copies are not asynchronous, where there is
        nothing to time."""

    def elapsed_ms(self, start: Event, end: Event) -> float:
        """Milliseconds from one completed event to another; negative when `end` came first."""

    def synchronize(self) -> None:
        """Wait until the device has done everything."""

    def reset_peak(self) -> None:
        """Forget what `peak_bytes` was."""

    def peak_bytes(self) -> int | None:
        """The device memory's highest use since `reset_peak`; None where it is not counted."""

    def unused_bytes(self) -> int | None:
        """What nobody needed of the device's memory since `reset_peak`; None where it is not counted."""


def allocate_pageable(num_bytes: int) -> HostSlab:
    """Plain host memory. Raises MemoryError when the system refuses."""
    try:
        return HostSlab(torch.empty(num_bytes, dtype=torch.uint8, device="cpu"), num_bytes)
    except RuntimeError as error:
        raise MemoryError(f"the system refused {num_bytes} bytes of host memory: {error}") from error
