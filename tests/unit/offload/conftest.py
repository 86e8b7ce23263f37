from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from nemo_rl_offload.offload import CudaBackend, HostBackend, OffloadEngine
from nemo_rl_offload.offload.backends.base import Backend, Block, Event

CUDA = pytest.param(
    "cuda", marks=[pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
)


class PromptCudaBackend(CudaBackend):
    """Copies out have ended when they return, and no times are told, so that the same things happen as on the CPU."""

    def copy_out(self, moves: Sequence[tuple[torch.UntypedStorage, Block]]) -> Event:
        event = super().copy_out(moves)
        torch.cuda.synchronize()
        return event

    def mark(self) -> Event | None:
        return None


@pytest.fixture(params=["cpu", CUDA])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where tensors are made; the engine's tests run on each."""
    with torch.device(request.param):
        yield request.param


@pytest.fixture
def make_engine(device: str) -> Callable[..., OffloadEngine]:
    def make(**changes: int) -> OffloadEngine:
        settings = {"host_memory_budget_bytes": 64 << 20, "min_tensor_bytes": 0, **changes}
        backend: Backend = HostBackend() if device == "cpu" else PromptCudaBackend()
        return OffloadEngine(backend, **settings)

    return make
