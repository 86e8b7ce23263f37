import copy
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from patience import within_patience

from nemo_rl_offload.config.loader import PROJECT_ROOT, load_config
from nemo_rl_offload.offload import CudaBackend, HostBackend, OffloadEngine
from nemo_rl_offload.offload.backends.base import Backend, Block, Event

torch.set_num_threads(1)  # the cores are shared by as many processes of tests, whose threads would wait for each other


@pytest.fixture
def never_waits() -> Iterator[None]:
    """A test that waits, for a pipe's other end above all, fails."""
    with within_patience():
        yield


@pytest.fixture(scope="session")
def make_policy() -> Callable[..., Any]:
    """The `policy` section of the tiny exemplar, with overrides relative to `megatron_cfg`."""
    path = PROJECT_ROOT / "examples/configs/grpo_tiny.yaml"
    unchanged = load_config(path)["policy"]

    def make(*overrides: str) -> Any:
        changes = [f"policy.megatron_cfg.{override}" for override in overrides]
        return load_config(path, changes)["policy"] if changes else copy.deepcopy(unchanged)

    return make


@pytest.fixture(scope="session")
def process_group(make_policy: Callable[..., Any]) -> Iterator[None]:
    """A group of one rank on the CPU in this process, split for Megatron."""
    from nemo_rl_offload.megatron.runtime.cpu import install_cpu_support

    if not install_cpu_support():
        pytest.skip("compares with the CPU's arithmetic, in a process without CUDA")
    import torch.distributed as dist
    from megatron.core import parallel_state

    from nemo_rl_offload.megatron.build.model import init_process_groups

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "RANK", "0")
        patch.setitem(os.environ, "WORLD_SIZE", "1")
        init_process_groups(make_policy(), seed=1)
    yield
    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


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
