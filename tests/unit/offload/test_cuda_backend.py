"""The CUDA backend, where there is a device."""

import os
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from nemo_rl_offload.offload import CudaBackend, OffloadEngine
from nemo_rl_offload.offload.backends.base import Block, Event, Extent
from nemo_rl_offload.offload.backends.cuda import _Event
from nemo_rl_offload.offload.backends.cuda_driver import cuda_driver

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def run(engine: OffloadEngine | None, x: torch.Tensor, num_layers: int) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    y = x * 1
    for layer in range(num_layers):
        if engine is None:
            y = torch.tanh(y @ x.t() @ y).exp().softmax(-1)
            continue
        with engine.region("m", layer) as region:
            y = torch.tanh(y @ x.t() @ y).exp().softmax(-1)
        y = engine.commit(region, y)
    loss = y.square().sum()
    del y
    loss.backward()
    assert x.grad is not None
    return [loss.detach(), x.grad]


@pytest.mark.parametrize("inflight_bytes", [0, 1 << 30])
@pytest.mark.parametrize("prefetch_bytes", [0, 1 << 30])
def test_gradients_are_bit_identical_and_memory_comes_back(inflight_bytes: int, prefetch_bytes: int) -> None:
    engine = OffloadEngine(
        CudaBackend(),
        host_memory_budget_bytes=1 << 30,
        max_inflight_bytes=inflight_bytes,
        max_prefetch_bytes=prefetch_bytes,
    )
    torch.manual_seed(0)
    for size in (1024, 768, 1024):
        x = torch.randn(size, size, device="cuda")
        expected = run(None, x, 6)
        got = run(engine, x, 6)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    stats = engine.stats()
    assert stats.bytes_out == stats.bytes_in + stats.returned_bytes > 0
    assert stats.host_bytes == 0
    engine.close()


@pytest.mark.skipif(
    os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING") == "1", reason="nobody counts the peak without the allocator"
)
def test_what_a_step_needed_at_its_peak_is_not_unused_after_it() -> None:
    backend = CudaBackend()
    torch.cuda.empty_cache()
    backend.reset_peak()
    before = backend.unused_bytes()
    needed = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    del needed
    kept = backend.unused_bytes()
    torch.cuda.empty_cache()
    emptied = backend.unused_bytes()
    backend.reset_peak()
    again = backend.unused_bytes()
    assert before is not None
    assert kept is not None
    assert emptied is not None
    assert again is not None
    for found, gone in ((kept, 1 << 30), (emptied, 1 << 30), (again, 0)):
        assert abs(before - gone - found) < 64 << 20


@pytest.mark.skipif(
    os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING") == "1", reason="nobody counts the peak without the allocator"
)
def test_offloading_lowers_the_peak() -> None:
    def peak_bytes(engine: OffloadEngine | None) -> int:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        run(engine, torch.ones(2048, 2048, device="cuda"), 12)
        return torch.cuda.max_memory_allocated()

    engine = OffloadEngine(
        CudaBackend(),
        host_memory_budget_bytes=4 << 30,
        max_inflight_bytes=64 << 20,
        max_prefetch_bytes=64 << 20,
    )
    plain = peak_bytes(None)
    assert peak_bytes(engine) < plain / 2
    engine.close()


@pytest.mark.skipif(
    os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING") == "1", reason="CUDA graphs need the caching allocator"
)
def test_modules_that_a_cuda_graph_holds_stand_between_offloaded_ones() -> None:
    """As with `cuda_graph_modules: [attn]` of Megatron beside offloaded MLPs; what is captured has its own memory."""
    torch.manual_seed(0)
    width = 1024
    captured = [torch.nn.Linear(width, width, device="cuda") for _ in range(3)]
    offloaded = [
        torch.nn.Sequential(
            torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width)
        ).cuda()
        for _ in captured
    ]
    parameters = [parameter for module in (*captured, *offloaded) for parameter in module.parameters()]
    samples = tuple((torch.randn(512, width, device="cuda", requires_grad=True),) for _ in captured)
    graphs = torch.cuda.make_graphed_callables(tuple(captured), samples)
    engine = OffloadEngine(CudaBackend(), host_memory_budget_bytes=1 << 30)
    engine.exclude(parameters)

    def gradients(x: torch.Tensor, *, offload: bool) -> list[torch.Tensor]:
        x = x.clone().requires_grad_()
        y = x
        for layer, (graph, module) in enumerate(zip(graphs, offloaded, strict=True)):
            y = graph(y)
            if not offload:
                y = module(y)
                continue
            with engine.region("mlp", layer) as region:
                y = module(y)
            y = engine.commit(region, y)
        return [gradient.clone() for gradient in torch.autograd.grad(y.square().mean(), [x, *parameters])]

    for _ in range(3):
        x = torch.randn(512, width, device="cuda")
        expected = gradients(x, offload=False)
        assert all(map(torch.equal, gradients(x, offload=True), expected))
    stats = engine.stats()
    assert stats.bytes_out == stats.bytes_in + stats.returned_bytes > 0
    engine.close()


def test_copies_leave_the_current_stream_and_device_alone() -> None:
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
    engine = OffloadEngine(CudaBackend(device), host_memory_budget_bytes=1 << 30)
    before = torch.cuda.current_device()
    with torch.cuda.stream(stream):
        x = torch.randn(1024, 1024, device=device)
    torch.cuda.set_stream(stream)
    torch.cuda.set_device(before)
    try:
        expected, got = (run(each, x, 6) for each in (None, engine))
        assert torch.cuda.current_stream(device) == stream
        assert torch.cuda.current_device() == before
    finally:
        torch.cuda.set_stream(torch.cuda.default_stream(device))
        torch.cuda.set_device(before)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert engine.stats().bytes_out > 0
    engine.close()


def test_refused_pinning_is_a_warning_once(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty

    def refuse(*args: object, **kwargs: object) -> torch.Tensor:
        if kwargs.get("pin_memory"):
            raise RuntimeError("no pinned memory left")
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", refuse)
    backend = CudaBackend()
    with pytest.warns(UserWarning, match="pageable"):
        assert not backend.allocate_host(512).data.is_pinned()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        backend.allocate_host(512)


@pytest.mark.parametrize("max_piece_bytes", [1, 7, 4096, 32 << 20])
@pytest.mark.parametrize("num_bytes", [1, 511, 4099, (32 << 20) + 5])
def test_copies_in_pieces_move_every_byte(max_piece_bytes: int, num_bytes: int) -> None:
    if num_bytes // max_piece_bytes > 5000:
        pytest.skip("thousands of pieces show no more than hundreds")
    backend = CudaBackend()
    for lane in (backend._out, backend._in):
        lane._max_piece_bytes = lane._left_bytes = max_piece_bytes
    slabs = [backend.allocate_host(num_bytes) for _ in range(2)]
    pieces = (Extent(slabs[0], 0, 0, num_bytes // 2), Extent(slabs[1], 1, 0, num_bytes))
    block = Block(pieces[num_bytes < 2 :], num_bytes)
    source = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device="cuda")
    for _ in range(2):
        block.last_event = backend.copy_out([(source.untyped_storage(), block)])
        (arrived,), event = backend.copy_in([block], [])
        backend.compute_wait(event)
        assert torch.equal(arrived, source)
        source += 1


def test_pageable_memory_changes_no_bit() -> None:
    backend = CudaBackend()
    backend._pin = False
    engine = OffloadEngine(backend, host_memory_budget_bytes=1 << 30)
    for size in (1024, 768):
        x = torch.randn(size, size, device="cuda")
        expected, got = (run(each, x, 6) for each in (None, engine))
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert engine.stats().bytes_out > 0
    engine.close()


def test_pinned_memory_given_up_under_a_copy_goes_to_nobody_else() -> None:
    backend = CudaBackend()
    slab = backend.allocate_host(1 << 30)
    address = slab.data.data_ptr()
    source = torch.zeros(1 << 30, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    block = Block((Extent(slab, 0, 0, 1 << 30),), 1 << 30)
    copied = backend.copy_out([(source.untyped_storage(), block)])
    del block
    del slab
    other = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    assert other.data_ptr() != address or backend.done(copied)


def test_an_event_is_used_again_when_nobody_holds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = CudaBackend()
    first, second = backend.mark(), backend.mark()
    assert isinstance(first, _Event)
    assert isinstance(second, _Event)
    handle = first.handle
    assert handle != second.handle
    del first
    third = backend.mark()
    assert isinstance(third, _Event)
    assert third.handle == handle
    torch.cuda.synchronize()
    assert backend.done(third)
    assert backend.elapsed_ms(second, third) >= 0
    destroyed, destroy = [], cuda_driver().destroy
    monkeypatch.setattr(cuda_driver(), "destroy", lambda handle: (destroyed.append(handle), destroy(handle)))
    handles = {handle, second.handle}
    del backend, second
    assert destroyed == []
    del third  # the handles go with the last event
    assert set(destroyed) == handles


def test_a_thread_may_come_to_the_device_first_through_the_engine() -> None:
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    backend = CudaBackend(device)
    slab = backend.allocate_host(1 << 20)
    block = Block((Extent(slab, 0, 0, 1 << 20),), 1 << 20)
    source = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8, device=device)
    torch.cuda.synchronize(device)

    def there_and_back() -> torch.Tensor:
        start = backend.mark()
        block.last_event = backend.copy_out([(source.untyped_storage(), block)])
        (arrived,), event = backend.copy_in([block], [])
        backend.compute_wait(event)
        end = backend.mark()
        backend.synchronize()
        assert start is not None
        assert end is not None
        events.extend((start, end, event))
        return arrived

    events: list[Event] = []
    first_calls = (lambda: backend.done(events[2]), lambda: backend.elapsed_ms(events[0], events[1]) > 0)
    with ThreadPoolExecutor(1) as pool:
        assert torch.equal(pool.submit(there_and_back).result(), source)
    for call in first_calls:
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(call).result()


def test_the_driver_names_what_it_refuses() -> None:
    driver = cuda_driver()
    with pytest.raises(RuntimeError, match="CUDA_ERROR"):
        driver.record(0, torch.cuda.current_stream().cuda_stream)
    with pytest.raises(RuntimeError, match="CUDA_ERROR"):
        driver.passed(0)
