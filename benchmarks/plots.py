"""Pictures of results, drawn from their JSON wherever matplotlib is."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from frontier import Point
from lanes import LANES

from nemo_rl_offload.bench import tradeoff

matplotlib.use("Agg")
from matplotlib import pyplot

COLORS = {"compute": "tab:blue", "copy out": "tab:orange", "copy in": "tab:green", "host": "tab:gray"}
KINDS = {"nothing": "black", "ours": "tab:blue", "megatron": "tab:red", "transformer_engine": "tab:purple"}
GIB = 1 << 30


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _title(result: Any) -> str:
    if "title" in result:
        return f"{result['device']}: {result['title']}"
    shape = result["shape"]
    return (
        f"{result['device']}: {shape['algorithm'].upper()}, {shape['num_layers']} layers "
        f"({shape['transformer_impl']}), {shape['sequence']} tokens"
    )


def draw_frontier(path: Path, result: Any, found: Sequence[Point]) -> None:
    """Peak memory against step time; one point a variant."""
    drawn = [
        tradeoff.Point(point.name, point.peak_bytes, point.step_ms, KINDS.get(point.kind, "tab:orange"))
        for point in found
    ]
    tradeoff.draw_tradeoff(path, _title(result), drawn)


def draw_steps(path: Path, result: Any) -> None:
    """Device peak and host memory of each step."""
    figure, (device, host) = pyplot.subplots(2, 1, figsize=(8, 6), sharex=True, layout="constrained")
    for each in result["variants"]:
        color = KINDS[each["kind"]]
        peaks = [sample["peak_allocated_bytes"] / GIB for sample in each["steps"]]
        device.plot(peaks, color=color, label=each["name"], linewidth=0.8)
        host.plot([sample.get("host_capacity_bytes", 0) / GIB for sample in each["steps"]], color=color, linewidth=0.8)
    device.set_ylabel("device peak, GiB")
    device.legend(fontsize=7)
    host.set_ylabel("pinned host memory, GiB")
    host.set_xlabel("step")
    figure.suptitle(_title(result))
    _save(figure, path)


def draw_lanes(path: Path, result: Any) -> None:
    """When compute, copies and the host were busy in each profiled step."""
    figure, all_axes = pyplot.subplots(2, 1, figsize=(10, 5), sharex=True, layout="constrained")
    for step, axes in zip(result["steps"], all_axes, strict=True):
        for row, lane in enumerate(reversed(LANES)):
            bars = [(start, end - start) for start, end in step["lanes"][lane]]
            axes.broken_barh(bars, (row - 0.4, 0.8), color=COLORS[lane])
        axes.set_yticks(range(len(LANES)), list(reversed(LANES)))
        axes.set_ylim(-0.6, len(LANES) - 0.4)
        axes.set_title(f"{step['name']}: {step['figures']['span_ms']:.0f} ms", fontsize=9)
    all_axes[-1].set_xlabel("ms")
    figure.suptitle(_title(result))
    _save(figure, path)
