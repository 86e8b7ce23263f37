"""What offloading cannot do without: as many bytes out in each forward and back in each backward, by nobody's order.

No tensor is saved or waited for, and the routers' answers go past the link as they do with an engine
(`routing_result`): as copies they would wait behind these. What a step takes longer beside these copies is what memory
and link cost that it shares with them; what it takes longer still with an engine is the engine's.
"""

import torch

from nemo_rl_offload.adapters.megatron_core.installation import make_backend
from nemo_rl_offload.offload.backends.base import Block, Extent


class BareCopies:
    """Copies of `num_bytes` each way, on the streams that an engine would use."""

    def __init__(self, num_bytes: int) -> None:
        self._backend = make_backend()
        self._source = torch.zeros(num_bytes, dtype=torch.uint8, device=self._backend.device)
        slabs = [self._backend.allocate_host(num_bytes) for _ in range(2)]
        self._out, self._back = (Block((Extent(slab, 0, 0, num_bytes),), num_bytes) for slab in slabs)
        self._back.last_event = self._backend.copy_out([(self._source.untyped_storage(), self._back)])
        self._arriving = self._backend.copy_in([self._back], [])

    def out(self) -> None:
        """Call when a forward begins."""
        self._backend.copy_out([(self._source.untyped_storage(), self._out)])

    def back(self) -> None:
        """Call when a backward begins. What the one before brought back has been here since."""
        self._backend.compute_wait(self._arriving[1])
        self._arriving = self._backend.copy_in([self._back], [])
