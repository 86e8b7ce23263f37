"""The paged stash's copies beside a device copy, and a stack of MoE layers with it beside what else one would use.

Copies: rows of several widths, pages of several sizes, several shares of live rows; the time of `stash` and of
`restore` against `copy_` of the same live bytes on the same device. Layers: memory and time of a step with dynamic
shapes, with buffers of fixed size kept as they are, with the stash (on the device, on the host, captured), and with the
same modules offloaded. Gradients of each variant are compared with those of dynamic shapes (`torch.equal`).
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from nemo_rl_offload.bench.expert_layers import ExpertLayers, StackShape, make_input
from nemo_rl_offload.bench.process import deterministic
from nemo_rl_offload.offload.backends.cuda import CudaBackend
from nemo_rl_offload.offload.backends.host import HostBackend
from nemo_rl_offload.offload.engine import OffloadEngine
from nemo_rl_offload.offload.options import OffloadOptions, build_engine
from nemo_rl_offload.paged_stash.graph import CapturedStep
from nemo_rl_offload.paged_stash.kernels import Pool

ON_DEVICE = StackShape(4, 4096, 1536, 64, 6, 8192, "bfloat16")
"""Experts of Qwen3-235B's size, as many as an eighth of them."""
SMALL = StackShape(2, 32, 32, 4, 2, 64, "float32")
"""What a CPU does in a second in Triton's interpreter."""

CAPACITY_FACTOR = 2.0
VARIANTS: dict[str, dict[str, float | None]] = {
    "dynamic": {"capacity_factor": None},
    "fixed buffers": {"capacity_factor": CAPACITY_FACTOR},
    "stash": {"capacity_factor": CAPACITY_FACTOR, "factor_cuda": 1.1},
    "stash, captured": {"capacity_factor": CAPACITY_FACTOR, "factor_cuda": 1.1},
    "stash on the host": {"capacity_factor": CAPACITY_FACTOR, "factor_cuda": 0.0, "factor_cpu": 1.1},
    "offload": {"capacity_factor": None},
}
OFFLOADED = ("expert_fc1", "moe_act", "expert_fc2")
NUM_MICROBATCHES = 2


@dataclass
class CopyFigures:
    """Rates of one kind of copy, in bytes that live per second; ratios to `copy_`."""

    row_bytes: int
    page_size: int
    live_fraction: float
    copy_gb_per_s: float
    stash_gb_per_s: float
    restore_gb_per_s: float
    stash_ratio: float
    restore_ratio: float


@dataclass
class LayerFigures:
    """One variant of the layers; bytes and milliseconds per step."""

    name: str
    step_ms: float = 0.0
    step_ms_rounds: list[float] = field(default_factory=list)
    peak_bytes: int | None = None
    live_bytes: int | None = None
    """Of what the stash held at its fullest, rounded up to pages."""
    stash_bytes: int | None = None
    bit_identical: bool = False
    error: str | None = None


def measure_copies(device: torch.device, repeats: int) -> list[CopyFigures]:
    """All combinations; on a CPU one of each, of a few rows."""
    is_cuda = device.type == "cuda"
    row_widths = (2048, 5760, 14336) if is_cuda else (64,)
    page_sizes = (16, 64, 256) if is_cuda else (4, 8)
    capacity = 32768 if is_cuda else 32
    return [
        _measure_copy(device, row_bytes, page_size, fraction, capacity, repeats)
        for row_bytes in row_widths
        for page_size in page_sizes
        for fraction in (0.25, 0.5, 1.0)
    ]


def _measure_copy(
    device: torch.device, row_bytes: int, page_size: int, fraction: float, capacity: int, repeats: int
) -> CopyFigures:
    live = int(capacity * fraction)
    pool = Pool(row_bytes, page_size, -(-live // page_size), 0, device)
    source = torch.randint(0, 256, (capacity * row_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    num_rows, record = torch.tensor([live], device=device), pool.new_record(capacity)
    size = live * row_bytes
    times: dict[str, list[float]] = {"copy": [], "stash": [], "restore": []}
    for _ in range(repeats + 2):
        times["copy"].append(_seconds(device, lambda: target[:size].copy_(source[:size])))
        times["stash"].append(_seconds(device, lambda: pool.stash(source, num_rows, record)))
        times["restore"].append(_seconds(device, lambda: pool.restore(target, record)))
    rates = {name: size / statistics.median(each[2:]) / 1e9 for name, each in times.items()}
    assert torch.equal(source[:size], target[:size])
    return CopyFigures(
        row_bytes,
        page_size,
        fraction,
        rates["copy"],
        rates["stash"],
        rates["restore"],
        rates["stash"] / rates["copy"],
        rates["restore"] / rates["copy"],
    )


def _seconds(device: torch.device, work: Callable[[], object]) -> float:
    """By the device's clock; a kernel before the first event keeps the launch itself out of the time."""
    if device.type != "cuda":
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    event: Any = torch.cuda.Event
    begin, end = event(enable_timing=True), event(enable_timing=True)
    torch.cuda._sleep(200_000)  # type: ignore[no-untyped-call]
    begin.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def measure_layers(
    shape: StackShape, device: torch.device, num_rounds: int, progress: Callable[[str], object]
) -> list[LayerFigures]:
    """Every variant alone, one after another; the first is the reference of the gradients' bits."""
    reference: list[Tensor] | None = None
    results = []
    for name in VARIANTS:
        if name == "stash, captured" and device.type != "cuda":
            continue
        progress(name)
        figures = LayerFigures(name)
        try:
            gradients = _measure_variant(shape, device, num_rounds, figures)
        except torch.OutOfMemoryError as error:
            figures.error = str(error).splitlines()[0]
        else:
            reference = gradients if reference is None else reference
            figures.bit_identical = all(map(torch.equal, gradients, reference))
            del gradients
        results.append(figures)
    return results


def _measure_variant(shape: StackShape, device: torch.device, num_rounds: int, figures: LayerFigures) -> list[Tensor]:
    gc.collect()  # the variant before, whose model and step refer to each other
    torch.manual_seed(0)
    settings = dict(VARIANTS[figures.name])
    with _offloading(figures.name == "offload") as engine:
        modules = () if engine is None else OFFLOADED
        model = ExpertLayers(shape, settings.pop("capacity_factor"), modules=modules, **settings).train()
        if engine is not None:
            engine.exclude(model.parameters())
        x = make_input(shape)
        for tensor in (x, *model.parameters()):
            tensor.grad = torch.zeros_like(tensor)

        def attempt() -> list[Tensor]:
            gradients = [tensor.grad for tensor in (x, *model.parameters()) if tensor.grad is not None]
            for gradient in gradients:
                gradient.zero_()
            outputs = [model(x) for _ in range(NUM_MICROBATCHES)]
            for output in outputs:
                output.float().square().mean().backward()
            return gradients

        step: Callable[[], list[Tensor]] = attempt
        if figures.name == "stash, captured":
            assert model.guard is not None
            step = CapturedStep(attempt, model.guard)
        with deterministic():
            gradients = [each.to("cpu", copy=True) for each in _run(model, attempt)]
        for _ in range(3):
            _run(model, step)
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        figures.step_ms_rounds = [1e3 * _seconds(device, lambda: _run(model, step)) for _ in range(num_rounds)]
        figures.step_ms = statistics.median(figures.step_ms_rounds)
        if device.type == "cuda":
            figures.peak_bytes = torch.cuda.max_memory_allocated()
        if model.guard is not None and model.guard.stash is not None:
            sizes = model.guard.stash.sizes()
            figures.live_bytes, figures.stash_bytes = sizes["peak_bytes"], sizes["device_bytes"] + sizes["host_bytes"]
    return gradients


def _run(model: ExpertLayers, step: Callable[[], list[Tensor]]) -> list[Tensor]:
    return step() if model.guard is None else model.guard.run(step)


@contextmanager
def _offloading(on: bool) -> Iterator[OffloadEngine | None]:
    """The project's engine in Megatron's layers, for what the stash would hold."""
    from nemo_rl_offload.adapters.megatron_core.interface import use_engine

    if not on:
        use_engine(None)
        yield None
        return
    backend = CudaBackend() if torch.cuda.is_available() else HostBackend()
    options = OffloadOptions(modules=OFFLOADED, host_memory_budget_bytes=64 << 30, min_tensor_bytes=0)
    engine = build_engine(options, backend)
    use_engine(engine, options.modules)
    try:
        yield engine
        assert engine.stats().bytes_out > 0, "nothing was offloaded"
    finally:
        use_engine(None)
        engine.close()


def to_json(
    shape: StackShape, device: torch.device, copies: list[CopyFigures], layers: list[LayerFigures]
) -> dict[str, object]:
    """Everything that was measured, and on what."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU (shows that it works alone)",
        "torch": torch.__version__,
        "shape": asdict(shape),
        "microbatches": NUM_MICROBATCHES,
        "capacity_factor": CAPACITY_FACTOR,
        "copies": [asdict(each) for each in copies],
        "layers": [asdict(each) for each in layers],
    }
