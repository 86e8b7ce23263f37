"""What a MoE layer's host waits for does not queue behind offloaded activations."""

import time

import pytest
import torch
from megatron.core.transformer.moe import token_dispatcher

from nemo_rl_offload.adapters.megatron_core.interface import use_engine
from nemo_rl_offload.adapters.megatron_core.routing_result import bypass_copy_engine, to_host
from nemo_rl_offload.offload import CudaBackend, HostBackend, OffloadEngine

needs_device = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_only_an_engine_on_a_device_replaces_megatrons_copy() -> None:
    original = token_dispatcher.maybe_move_tensor_to_cpu
    engine = OffloadEngine(HostBackend(), host_memory_budget_bytes=1 << 20)
    use_engine(engine, ["moe_act"])
    assert token_dispatcher.maybe_move_tensor_to_cpu is original
    use_engine(None)
    assert token_dispatcher.maybe_move_tensor_to_cpu is original


def test_the_original_comes_back_and_does_what_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(token_dispatcher, "maybe_move_tensor_to_cpu", lambda *args: calls.append(args) or args[0])
    original = token_dispatcher.maybe_move_tensor_to_cpu
    bypass_copy_engine(True)
    bypass_copy_engine(True)
    on_host = torch.arange(3)
    assert token_dispatcher.maybe_move_tensor_to_cpu(on_host, as_numpy=True) is on_host
    assert token_dispatcher.maybe_move_tensor_to_cpu(7) == 7
    assert calls == [(on_host, True, False), (7, False, False)]
    bypass_copy_engine(False)
    bypass_copy_engine(False)
    assert token_dispatcher.maybe_move_tensor_to_cpu is original


@pytest.mark.cuda
@needs_device
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(1,), (), (16,), (4, 33), (8, 4, 2)])
def test_results_arrive_whole(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    bypass_copy_engine(True)
    move = token_dispatcher.maybe_move_tensor_to_cpu
    stream = torch.cuda.Stream()
    for _ in range(50):
        tensor = torch.randint(-(1 << 30), 1 << 30, shape, dtype=dtype, device="cuda")
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            moved, array = move(tensor, record_stream=True), move(tensor, as_numpy=True, record_stream=True)
        stream.record_event().synchronize()
        assert moved.is_pinned()
        assert torch.equal(moved, tensor.cpu())
        assert (array == tensor.cpu().numpy()).all()
    bypass_copy_engine(False)
    for other in (torch.ones(3, device="cuda"), torch.ones(3, device="cuda", dtype=torch.bool)):
        assert torch.equal(move(other).cpu(), other.cpu())


@pytest.mark.cuda
@needs_device
def test_a_result_does_not_wait_for_copies() -> None:
    """Of 16 GiB, 0.3 s of the link: kernels of other processes on the device may go first."""
    backend = CudaBackend()
    engine = OffloadEngine(backend, host_memory_budget_bytes=4 << 30)
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    block = engine._arena.reserve(source.nbytes)
    assert block is not None
    result = torch.arange(16, device="cuda")
    to_host(result)
    torch.cuda.synchronize()
    start = time.perf_counter()
    copied = [backend.copy_out([(source.untyped_storage(), block)]) for _ in range(16)][-1]
    moved = to_host(result)
    torch.cuda.current_stream().synchronize()
    took_ms = (time.perf_counter() - start) * 1e3
    assert not backend.done(copied), f"the copies had ended after {took_ms} ms: this shows nothing"
    assert torch.equal(moved, result.cpu())
