"""The CPU as the device: copies are synchronous, the engine's code path is the same as on an accelerator."""

from collections.abc import Sequence
from ctypes import CDLL, c_void_p

import torch
from torch import Tensor, UntypedStorage

from nemo_rl_offload.offload.backends.base import Block, Event, HostSlab, allocate_pageable

_DONE: Event = None
_EMPTY = torch.empty(0, dtype=torch.uint8, device="cpu")
# `ctypes.memmove` takes half as long again: it converts a result, and its size as a `c_size_t`.
_memmove = CDLL(None).memmove
_memmove.argtypes, _memmove.restype = (c_void_p, c_void_p, c_void_p), None


class HostBackend:
    """See `Backend`. Every event is complete when it is returned."""

    device = torch.device("cpu")

    def allocate_host(self, num_bytes: int) -> HostSlab:
        return allocate_pageable(num_bytes)

    def copy_out(self, moves: Sequence[tuple[UntypedStorage, Block]]) -> Event:
        for source, block in moves:
            assert source.nbytes() == block.num_bytes, "a saved tensor's storage was resized"
            address = source.data_ptr()
            for host_address, num_bytes in block.parts:
                _memmove(host_address, address, num_bytes)
                address += num_bytes
        return _DONE

    def copy_in(
        self, blocks: Sequence[Block], started: list[torch.UntypedStorage | Tensor]
    ) -> tuple[list[Tensor], Event]:
        destinations = [_EMPTY.new_empty(block.num_bytes) for block in blocks]
        started += destinations
        for destination, block in zip(destinations, blocks, strict=True):
            address = destination.data_ptr()
            for host_address, num_bytes in block.parts:
                _memmove(address, host_address, num_bytes)
                address += num_bytes
        return destinations, _DONE

    def compute_wait(self, event: Event) -> None:
        assert event is _DONE

    def done(self, event: Event) -> bool:
        return event is _DONE

    def mark(self) -> Event | None:
        return None

    def elapsed_ms(self, start: Event, end: Event) -> float:
        raise AssertionError("no marks are made here")

    def synchronize(self) -> None:
        """Nothing is ever under way."""

    def reset_peak(self) -> None:
        """Nothing counts."""

    def peak_bytes(self) -> int | None:
        return None

    def unused_bytes(self) -> int | None:
        return None
