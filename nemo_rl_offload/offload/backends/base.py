"""What the engine asks of a device: host memory, copies both ways, and events that order them."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

type Event = Hashable
"""A point in a stream of device work. Opaque: only the backend that made it reads it."""


@dataclass(frozen=True, slots=True, eq=False)
class HostSlab:
    """One allocation of host memory: `data` is a one-dimensional uint8 CPU tensor of `num_bytes`."""

    data: Tensor
    num_bytes: int


@dataclass(slots=True, eq=False)
class Block:
    """A piece of a slab, holding the bytes of one storage.

    `fences` are the copies of former owners that may still touch these bytes: a first write waits for them.
    `last_event` is this owner's latest copy, out or in: whatever touches the bytes next waits for it.
    """

    slab: HostSlab
    offset: int
    num_bytes: int
    fences: tuple[Event, ...] = ()
    last_event: Event | None = None

    def data(self) -> Tensor:
        """uint8 CPU tensor of `num_bytes`, a view of the slab."""
        return self.slab.data[self.offset : self.offset + self.num_bytes]


@dataclass(frozen=True, slots=True)
class Spec:
    """The device tensor that a copy in makes: one-dimensional uint8, `num_bytes` long."""

    num_bytes: int


class Backend(Protocol):
    """One device. Every copy is asynchronous; the event it returns completes when the bytes have arrived."""

    @property
    def device(self) -> torch.device: ...

    def allocate_host(self, num_bytes: int) -> HostSlab:
        """Host memory; raises MemoryError when the system refuses."""

    def copy_out(self, source: Tensor, block: Block) -> Event:
        """Copy `source` (uint8, one-dimensional, on the device) into `block`, after the work that the compute
        stream holds now and after `block.fences`. The caller keeps `source` alive until the event is done."""

    def copy_in(self, block: Block, like: Spec) -> tuple[Tensor, Event]:
        """Copy `block` into a new device tensor from the compute stream's pool, after `block.last_event`.
        The caller lets the compute stream wait for the event before it reads, or frees, the tensor."""

    def compute_wait(self, event: Event) -> None:
        """Let the compute stream wait for `event`; the host goes on."""

    def done(self, event: Event) -> bool:
        """Whether `event` has completed; never waits."""


def allocate_pageable(num_bytes: int) -> HostSlab:
    """Plain host memory. Raises MemoryError when the system refuses."""
    try:
        return HostSlab(torch.empty(num_bytes, dtype=torch.uint8, device="cpu"), num_bytes)
    except RuntimeError as error:
        raise MemoryError(f"the system refused {num_bytes} bytes of host memory: {error}") from error
