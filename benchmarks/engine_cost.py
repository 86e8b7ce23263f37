"""What the engine costs on the host: Python time per packed tensor and per group, beside TRL's offloading context.

    python benchmarks/engine_cost.py

Groups of one tensor and of nine tell the two costs apart. Tensors are tiny, so that copying them takes no time, but the
calls into torch that start the copies do: `packed_only` packs and unpacks the same tensors and moves none. What is
counted is the difference to the same model without offloading, medians of repetitions that take turns. Times are CPU
time of the process with one thread, so that other processes disturb less; `load` says how many there were. The
targets are 10 us a tensor and 30 us a group.

TRL's context cannot be timed on a CPU. Its constructor makes a stream of the accelerator, and raises without one; with
that replaced, its hooks would hand every tensor on the CPU back untouched, which is not what they do on a device.
"""

import contextlib
import importlib
import importlib.util
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from nemo_rl_offload.offload import CudaBackend, HostBackend, OffloadEngine
from nemo_rl_offload.offload.options import OffloadOptions, build_engine

NUM_GROUPS = 100
FEW, MANY = 1, 9
NUM_ROUNDS = 30


class Save(torch.autograd.Function):
    """Saves tensors and reads them back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *saved: Tensor) -> Tensor:
        ctx.save_for_backward(*saved)
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, *(None for _ in ctx.saved_tensors)


def forward(x: Tensor, num_tensors: int, engine: OffloadEngine | None) -> Tensor:
    for group in range(NUM_GROUPS):
        saved = [torch.empty(16, device=x.device) for _ in range(num_tensors)]
        if engine is None:
            x = Save.apply(x, *saved)
            continue
        with engine.region("m", group) as region:
            x = Save.apply(x, *saved)
        x = engine.commit(region, x)
    return x


def cost_us(
    device: str, num_tensors: int, engine: OffloadEngine | None, context: Callable[[], AbstractContextManager[Any]]
) -> tuple[float, float]:
    """Microseconds per group of a forward, and of its backward."""
    x = torch.ones(1, requires_grad=True, device=device)
    start = time.process_time()
    with context():
        y = forward(x, num_tensors, engine)
    middle = time.process_time()
    y.backward()
    end = time.process_time()
    if engine is not None:
        engine.end_step()
    if device == "cuda":
        torch.cuda.synchronize()
    return (middle - start) * 1e6 / NUM_GROUPS, (end - middle) * 1e6 / NUM_GROUPS


def why_no_trl() -> str | None:
    """Why TRL's context is not compared; None when it is."""
    if not torch.cuda.is_available():
        return "not measured: it needs an accelerator, and leaves tensors on the CPU alone"
    if importlib.util.find_spec("trl") is None:
        return "not measured: trl is not installed (uv run --group trl)"
    return None


def measure(device: str) -> dict[str, dict[str, float]]:
    backend = CudaBackend() if device == "cuda" else HostBackend()
    engines = {
        name: build_engine(
            OffloadOptions(modules=(), host_memory_budget_bytes=1 << 26, min_tensor_bytes=min_bytes), backend
        )
        for name, min_bytes in {"ours": 0, "packed_only": 1 << 20}.items()
    }
    ways: dict[str, tuple[OffloadEngine | None, Callable[[], AbstractContextManager[Any]]]] = {
        "off": (None, contextlib.nullcontext),
        **{name: (engine, contextlib.nullcontext) for name, engine in engines.items()},
    }
    if device == "cuda" and why_no_trl() is None:
        trl = importlib.import_module("trl.models.activation_offloading").OffloadActivations
        ways["trl"] = (None, lambda: trl(min_offload_size=1))
    samples: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for _ in range(NUM_ROUNDS):
        for num_tensors in (FEW, MANY):
            for name, (used, context) in ways.items():
                samples.setdefault((name, num_tensors), []).append(cost_us(device, num_tensors, used, context))
    medians = {key: [statistics.median(column) for column in zip(*rows, strict=True)] for key, rows in samples.items()}
    figures = {}
    for name in ways:
        if name != "off":
            few, many = (
                [a - b for a, b in zip(medians[name, count], medians["off", count], strict=True)]
                for count in (FEW, MANY)
            )
            per_tensor = [(b - a) / (MANY - FEW) for a, b in zip(few, many, strict=True)]
            figures[name] = {
                "tensor_forward_us": per_tensor[0],
                "tensor_backward_us": per_tensor[1],
                "group_forward_us": few[0] - FEW * per_tensor[0],
                "group_backward_us": few[1] - FEW * per_tensor[1],
            }
    return figures


def main() -> int:
    torch.set_num_threads(1)
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    result: dict[str, object] = {device: measure(device) for device in devices}
    result["trl"] = why_no_trl() or "measured"
    result["load"] = {"average_1_min": os.getloadavg()[0], "cores": os.cpu_count()}
    sys.stdout.write(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
