"""A stack of MoE layers on a device: no wait for the device inside it, and a captured step equals an eager one."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from nemo_rl_offload.bench.expert_layers import ExpertLayers, StackShape, make_input, one_rank
from nemo_rl_offload.paged_stash.graph import CapturedStep

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

can_capture = pytest.mark.skipif(
    os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING") == "1", reason="a graph's memory comes from the allocator"
)
SHAPE = StackShape(3, 512, 768, 8, 2, 1000, "bfloat16", shared_ffn_size=256)
SETTINGS: dict[str, dict[str, Any]] = {
    "buffers": {"capacity_factor": 1.5},
    "stash": {"capacity_factor": 1.5, "page_size": 64},
    "spill": {"capacity_factor": 1.5, "page_size": 16, "factor_cuda": 0.4, "factor_cpu": 1.2},
}


@pytest.fixture(scope="module", autouse=True)
def _process_group() -> Iterator[None]:
    with one_rank():
        yield


def build(setting: str) -> tuple[ExpertLayers, Callable[[], list[Tensor]]]:
    """A stack, and a step of two microbatches through it that leaves its gradients where they are."""
    torch.manual_seed(0)
    model = ExpertLayers(SHAPE, **SETTINGS[setting]).train()
    x = make_input(SHAPE)
    for tensor in (x, *model.parameters()):
        tensor.grad = torch.zeros_like(tensor)

    def attempt() -> list[Tensor]:
        for tensor in (x, *model.parameters()):
            assert tensor.grad is not None
            tensor.grad.zero_()
        losses = [model(x * scale).float().square().mean() for scale in (1.0, 0.5)]
        for loss in losses:
            loss.backward()
        return [loss.detach() for loss in losses] + [t.grad for t in (x, *model.parameters()) if t.grad is not None]

    return model, attempt


@pytest.fixture
def _deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """It also fills memory that is not initialized with NaN, as dead rows are."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("setting", SETTINGS)
def test_nothing_inside_waits_for_the_device(setting: str) -> None:
    model, attempt = build(setting)
    assert model.guard is not None
    for _ in range(2):  # the first sizes the pools, the second compiles
        model.guard.run(attempt)
    torch.cuda.set_sync_debug_mode("error")
    try:
        attempt()
        if model.guard.stash is not None:
            model.guard.stash.end_step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert model.guard.counts.reruns == 0


@can_capture
@pytest.mark.usefixtures("_deterministic")
@pytest.mark.parametrize("setting", SETTINGS)
def test_captured_equals_eager(setting: str) -> None:
    model, attempt = build(setting)
    assert model.guard is not None
    model.guard.run(attempt)
    eager = [tensor.clone() for tensor in model.guard.run(attempt)]
    step = CapturedStep(attempt, model.guard)
    for _ in range(4):
        result = model.guard.run(step)
        assert all(map(torch.equal, result, eager))
    assert step.is_captured
    assert model.guard.counts.reruns == 0
    assert all(bool(tensor.isfinite().all()) for tensor in eager)


@pytest.mark.usefixtures("_deterministic")
@pytest.mark.parametrize("setting", ["stash", "spill"])
def test_a_stash_changes_no_bit(setting: str) -> None:
    reference_model, reference_attempt = build("buffers")
    assert reference_model.guard is not None
    reference = reference_model.guard.run(reference_attempt)
    model, attempt = build(setting)
    model.load_state_dict(reference_model.state_dict())  # Megatron's own random numbers go on from build to build
    assert model.guard is not None
    for _ in range(3):
        assert all(map(torch.equal, model.guard.run(attempt), reference))
    stash = model.guard.stash
    assert stash is not None
    assert all(pool.counters()["peak"] > 0 for pool in stash.pools.values())


@can_capture
@pytest.mark.usefixtures("_deterministic")
def test_a_full_stash_loses_no_step_and_is_captured_anew() -> None:
    model, attempt = build("stash")
    assert model.guard is not None
    expected = [tensor.clone() for tensor in model.guard.run(attempt)]
    step = CapturedStep(attempt, model.guard)
    for _ in range(3):
        model.guard.run(step)
    stash = model.guard.stash
    assert stash is not None
    for pool in stash.pools.values():  # as if the pages were in use
        pool.state[0] += pool.num_device
    assert all(map(torch.equal, model.guard.run(step), expected))
    assert model.guard.counts.overflows == 1
    for pool in stash.pools.values():
        pool.state[0] -= pool.num_device
    for _ in range(3):
        assert all(map(torch.equal, model.guard.run(step), expected))
    assert step.is_captured
    assert model.guard.counts.reruns == 1
