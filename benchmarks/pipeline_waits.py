"""The waits of a pipeline's first stage, on one GPU: kernels that look at the clock in the place of other stages.

In 1F1B over p stages, the first one runs p forwards and then waits until the first gradient has come back through the
others, p forwards and p-1 backwards after it began; behind the last forward, gradients come a forward and a backward
apart. A stage that was late waits less: a wait ends at a time of the device's clock, not after a duration. (Rejected:
sleeping for a number of cycles, which take longer as the processors' frequency falls under load.)
"""

import torch
import triton
import triton.language as tl
from common import HAS_GPU
from torch import Tensor
from triton.language.extra.cuda import globaltimer


@triton.jit
def _write_time(at):  # type: ignore[no-untyped-def]
    tl.store(at, globaltimer())


@triton.jit
def _wait_until(at, after_ns):  # type: ignore[no-untyped-def]
    until = tl.load(at) + after_ns
    now = globaltimer()
    while now < until:
        now = globaltimer()


class PipelineWaits:
    """For a stage whose passes take these times without offloading, in ms. Does nothing on a CPU."""

    def __init__(self, num_stages: int, forward_ms: float, backward_ms: float) -> None:
        self.num_stages, self.forward_ms, self.backward_ms = num_stages, forward_ms, backward_ms

    def for_first_gradient(self, begun: Tensor | None) -> None:
        """Behind the forwards ahead of a step that began then."""
        others_ms = (self.num_stages - 1) * self.backward_ms
        wait_until(begun, others_ms + self.num_stages * self.forward_ms)

    def for_next_gradient(self, begun: Tensor | None) -> None:
        """Behind a backward that began then, when no forward is left."""
        wait_until(begun, self.forward_ms + self.backward_ms)


def device_time() -> Tensor | None:
    """When the current stream comes to this point: ns (int64, one element) on the device; None on a CPU."""
    if not HAS_GPU:
        return None
    at = torch.empty(1, dtype=torch.int64, device="cuda")
    _write_time[(1,)](at, num_warps=1)
    return at


def wait_until(at: Tensor | None, after_ms: float) -> None:
    """Let the current stream stand still until so long after that time."""
    if at is not None:
        _wait_until[(1,)](at, int(after_ms * 1e6), num_warps=1)
