"""The CPU as the device: copies are synchronous, the engine's code path is the same as on an accelerator."""

import torch
from torch import Tensor

from nemo_rl_offload.offload.backends.base import Block, Event, HostSlab, Spec, allocate_pageable

_DONE: Event = "done"


class HostBackend:
    """See `Backend`. Every event is complete when it is returned."""

    device = torch.device("cpu")

    def allocate_host(self, num_bytes: int) -> HostSlab:
        return allocate_pageable(num_bytes)

    def copy_out(self, source: Tensor, block: Block) -> Event:
        block.data().copy_(source)
        return _DONE

    def copy_in(self, block: Block, like: Spec) -> tuple[Tensor, Event]:
        destination = torch.empty(like.num_bytes, dtype=torch.uint8, device=self.device)
        return destination.copy_(block.data()), _DONE

    def compute_wait(self, event: Event) -> None:
        assert event is _DONE

    def done(self, event: Event) -> bool:
        return event is _DONE
