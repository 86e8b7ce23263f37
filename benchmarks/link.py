"""Ceilings of the device and of its link to the host, which every other figure is read against.

    python benchmarks/link.py --out benchmarks/results/DEVICE

Pinned copies each way and both ways at once over sizes, the time to pin memory, copies inside the device, products of
bfloat16 matrices. Medians of repetitions that take turns, by the device's events.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import environment

from nemo_rl_offload.bench.report import write_json

SIZES_MIB = (1, 4, 16, 64, 256, 1024)
NUM_REPETITIONS = 9
MATRIX_SIZE = 8192


def device_ms(work: Callable[[], object]) -> float:
    """Milliseconds between two events on the current stream around `work`, which must join its streams to it."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end))


def rates_gb_per_s(num_bytes: int) -> dict[str, list[float]]:
    """GB/s of one copy of this size out, in, both ways at once (their sum), and inside the device (read and write)."""
    host = [torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    device = [torch.empty(num_bytes, dtype=torch.uint8, device="cuda") for _ in range(3)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    current = torch.cuda.current_stream()

    def both() -> None:
        for stream in streams:
            stream.wait_stream(current)
        with torch.cuda.stream(streams[0]):
            host[0].copy_(device[0], non_blocking=True)
        with torch.cuda.stream(streams[1]):
            device[1].copy_(host[1], non_blocking=True)
        for stream in streams:
            current.wait_stream(stream)

    ways: dict[str, tuple[Callable[[], object], int]] = {
        "out": (lambda: host[0].copy_(device[0], non_blocking=True), 1),
        "in": (lambda: device[1].copy_(host[1], non_blocking=True), 1),
        "both": (both, 2),
        "device": (lambda: device[2].copy_(device[0]), 2),
    }
    samples: dict[str, list[float]] = {way: [] for way in ways}
    for repetition in range(NUM_REPETITIONS + 1):
        for way, (work, factor) in ways.items():
            ms = device_ms(work)
            if repetition:
                samples[way].append(factor * num_bytes / ms / 1e6)
    return samples


def pin_ms(num_bytes: int) -> float:
    torch._C._host_emptyCache()  # else a block that was pinned before comes back at once
    start = time.perf_counter()
    torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    return (time.perf_counter() - start) * 1e3


def bf16_tflops() -> list[float]:
    left, right = (torch.randn(MATRIX_SIZE, MATRIX_SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    samples = [device_ms(lambda: left @ right) for _ in range(NUM_REPETITIONS + 3)][3:]
    return [2 * MATRIX_SIZE**3 / ms / 1e9 for ms in samples]


def measure() -> dict[str, Any]:
    torch.cuda.init()
    copies = {size: rates_gb_per_s(size << 20) for size in SIZES_MIB}
    return {
        **environment(),
        "copies_gb_per_s": {
            f"{size} MiB": {way: statistics.median(values) for way, values in ways.items()}
            for size, ways in copies.items()
        },
        "copies_gb_per_s_samples": {f"{size} MiB": ways for size, ways in copies.items()},
        "pin_ms": {f"{size} MiB": pin_ms(size << 20) for size in (*SIZES_MIB[2:], 4096)},
        "bf16_tflops": statistics.median(bf16_tflops()),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the device and its link to the host.")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    data = measure()
    write_json(options.out / "link.json", data)
    print(json.dumps(data, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
