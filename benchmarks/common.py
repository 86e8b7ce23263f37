"""What the experiments share: where they run, how they time a step, and how they keep what they measured.

Every experiment has two forms. On a GPU it measures; on a CPU the same code runs a small case, which shows that it
works and whose figures mean nothing.
"""

import importlib.metadata
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from lanes import read_trace
from torch.profiler import ProfilerActivity, profile

from nemo_rl_offload.config.loader import PROJECT_ROOT
from nemo_rl_offload.offload import OffloadEngine
from nemo_rl_offload.offload.stats import OffloadStats

MAX_TRACE_MIB = 16
HAS_GPU = torch.cuda.is_available()
_PACKAGES = ("torch", "megatron-core", "megatron-bridge", "transformer-engine", "transformers", "vllm", "trl", "peft")

Sample = dict[str, float]
"""Figures of one step by name, with units in the names."""


def say(text: str) -> None:
    """Progress, for a person who waits."""
    print(text, file=sys.stderr, flush=True)


def environment() -> dict[str, Any]:
    """Where and with what a figure was measured."""
    device = {"device": "cpu", "device_memory_bytes": 0}
    if HAS_GPU:
        properties = torch.cuda.get_device_properties(0)
        device = {"device": properties.name, "device_memory_bytes": properties.total_memory}
    return {
        **device,
        "host": {"cores": os.cpu_count(), "memory_bytes": psutil.virtual_memory().total},
        "versions": {"python": platform.python_version(), "cuda": torch.version.cuda, **_versions()},
        "commit": _commit(),
        "command": command(),
    }


def command() -> list[str]:
    """This process's, but for the folder of the results, which is a path of this machine."""
    arguments = ["python", *sys.argv]
    return ["OUT" if before == "--out" else each for before, each in zip(["", *arguments], arguments, strict=False)]


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def _commit() -> str | None:
    """Of this checkout; BENCH_COMMIT names it where a copy without history runs."""
    if named := os.environ.get("BENCH_COMMIT"):
        return named
    git = ["git", "-C", str(PROJECT_ROOT), "rev-parse", "HEAD"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def prepare_process() -> None:
    """Set up what has to be there before the first CUDA call, and a process group of one rank for Megatron."""
    # Without it, matrix products are not reproducible enough to be compared bit by bit.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # as workers have it
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
    from nemo_rl_offload.megatron.runtime.cpu import install_cpu_support

    install_cpu_support()


def in_turn(names: Sequence[str], num_rounds: int, num_warmup_rounds: int = 0) -> Iterator[tuple[int, str]]:
    """A B A B ..., so that a drifting clock hits all alike; rounds below 0 are for warming up."""
    for number in range(-num_warmup_rounds, num_rounds):
        for name in names:
            yield number, name


def timed(step: Callable[[], object]) -> Sample:
    """Time one step by the device's events, with the highest device memory during it; by the clock on a CPU."""
    if not HAS_GPU:
        begin = time.perf_counter()
        step()
        return {"ms": (time.perf_counter() - begin) * 1e3, "peak_allocated_bytes": 0, "peak_reserved_bytes": 0}
    torch.cuda.reset_peak_memory_stats()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    step()
    end.record()
    torch.cuda.synchronize()
    return {
        "ms": float(start.elapsed_time(end)),
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
    }


def settled_stats(engine: OffloadEngine) -> OffloadStats:
    """The engine's totals, with the times of every step so far."""
    if HAS_GPU:
        torch.cuda.synchronize()
    return engine.stats()


def profiled(step: Callable[[], object], path: Path, name: str) -> dict[str, Any]:
    """Run a step under torch's profiler; write its trace to `path` (.json.gz), and return its lanes."""
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if HAS_GPU else [])]) as profiler:
        step()
        torch.cuda.synchronize()
    profiler.export_chrome_trace(str(path))
    if path.stat().st_size > MAX_TRACE_MIB << 20:
        say(f"{path} is above {MAX_TRACE_MIB} MiB: take fewer layers")
    return read_trace(path, name)


def medians(samples: Iterable[Sample]) -> Sample:
    """The median of each figure, and for times how far apart the lowest and the highest are (`_spread`, relative)."""
    samples = list(samples)
    found = {key: statistics.median(sample[key] for sample in samples) for key in samples[0]}
    for key in [key for key in found if key == "ms" or key.endswith("_ms")]:
        values = [sample[key] for sample in samples]
        found[f"{key}_spread"] = (max(values) - min(values)) / found[key] if found[key] else 0.0
    return found


def pinned_bytes() -> int:
    """Pinned host memory that torch's allocator has taken from the system, rounded up to powers of two as it does."""
    return int(torch.cuda.host_memory_stats()["allocated_bytes.current"]) if HAS_GPU else 0


def give_back_memory(keeps_pinned: bool = False) -> None:
    """Give cached memory back to the device, and to the host: pinning it again takes long."""
    import gc

    gc.collect()
    if HAS_GPU:
        torch.cuda.empty_cache()
        if not keeps_pinned:
            torch._C._host_emptyCache()
