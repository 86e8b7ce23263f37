"""Pictures of results, drawn from their JSON wherever matplotlib is."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib
from constants import MODEL
from frontier import Point
from lanes import LANES
from predictions import BARS, Prediction

from nemo_rl_offload.bench import tradeoff
from nemo_rl_offload.units import GIB

matplotlib.use("Agg")
from matplotlib import pyplot

COLORS = {"compute": "tab:blue", "copy out": "tab:orange", "copy in": "tab:green", "host": "tab:gray"}
KINDS = {"nothing": "black", "ours": "tab:blue", "megatron": "tab:red", "transformer_engine": "tab:purple"}
WAYS = {
    "off": ("no offloading", "black"),
    "on": ("this engine", "tab:blue"),
    "copies": ("bare copies", "tab:gray"),
    "megatron": ("Megatron-Core's", "tab:red"),
}
"""E1's names and colors, in the order of their bars."""


STEPS = {
    "megatron": "Megatron's sampler, torch layers",
    "torch": "vLLM, torch layers",
    "transformer_engine": "vLLM, Transformer Engine",
    "optimizer_on_host": "the same, optimizer on the host,\nwith a reference",
    "lora": "the same, LoRA,\nwith a reference",
}
"""Whole GRPO steps, by the name of the result."""


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


def draw_phases(path: Path, results: Mapping[str, Any]) -> None:
    """Whole RL steps, one bar each, with the seconds of every phase."""
    parts = {name: each["parts"].get("step", {}) for name, each in results.items()}
    order = [f"grpo_step_{name}" for name in STEPS]
    in_order = sorted(parts, key=lambda name: order.index(name) if name in order else len(order))
    steps = {name: parts[name]["medians"] for name in in_order if "medians" in parts[name]}
    device = next(iter(results.values()))["device"]
    figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.5 * len(steps)), layout="constrained")
    names = [name.removeprefix("grpo_step_") for name in steps]
    labels = [STEPS.get(name, name) for name in names]
    phases = dict.fromkeys(key for found in steps.values() for key in found if key.startswith("timing/"))
    left = [0.0] * len(steps)
    for phase in (each for each in phases if each != "timing/step_s"):
        seconds = [found.get(phase, 0.0) for found in steps.values()]
        bars = axes.barh(labels, seconds, left=left, label=phase.removeprefix("timing/").removesuffix("_s"))
        axes.bar_label(
            bars, [f"{each:.1f}" if each >= 0.3 else "" for each in seconds], label_type="center", fontsize=7
        )
        left = [begin + each for begin, each in zip(left, seconds, strict=True)]
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize=8)
    axes.set_xlabel("seconds of a steady step")
    axes.set_title(f"{device}: a GRPO step of a 1.5B model, 256 responses of 128 tokens", fontsize=9)
    figure.legend(loc="outside lower center", ncols=6, fontsize=8)
    _save(figure, path)


def draw_learning(path: Path, result: Any) -> None:
    """Validation by step, a line for each run."""
    figure, axes = pyplot.subplots(figsize=(8, 3.5), layout="constrained")
    for run in result["runs"]:
        steps, values = zip(*run["validation"], strict=True)
        axes.plot(steps, values, "o-", markersize=3, label=run.get("name", f"seed {run['seed']}"))
    is_accuracy = result["runs"][0].get("metric", "accuracy") == "accuracy"
    axes.set_ylim(0, 1 if is_accuracy else None)
    axes.set_xlabel("optimizer steps")
    axes.set_ylabel("right of the validation problems" if is_accuracy else "validation loss")
    axes.set_title(f"{result['device']}: {result['title']}", fontsize=8)
    axes.legend(fontsize=8)
    _save(figure, path)


def draw_ways(path: Path, result: Any) -> None:
    """E1: step times, each sample a point and the median a bar, and the peak of each way."""
    figure, (times, peaks) = pyplot.subplots(1, 2, figsize=(9, 4), layout="constrained")
    for way, (label, color) in WAYS.items():
        if not (samples := result["samples"].get(way)):
            continue
        milliseconds = [sample["ms"] for sample in samples]
        times.bar(label, median(milliseconds), color=color, alpha=0.4)
        times.plot([label] * len(samples), milliseconds, "o", color=color, markersize=4)
        if way != "copies":  # whose own buffers are no part of a step
            peak_gib = median(sample["peak_allocated_bytes"] for sample in samples) / GIB
            peaks.bar_label(peaks.bar(label, peak_gib, color=color, alpha=0.4), fmt="%.1f")
    for axes in (times, peaks):
        axes.tick_params(axis="x", labelsize=8)
    times.set_ylabel("step, ms")
    peaks.set_ylabel("peak device memory, GiB")
    bound_gib = result["max_inflight_bytes"] / GIB
    about = f"{result['layers']} DeepSeek-V3 layers ({result['transformer_impl']}), {bound_gib:g} GiB under way"
    figure.suptitle(f"{result['device']}: {about}")
    _save(figure, path)


def draw_reach(path: Path, result: Any) -> None:
    """E4: the longest sequence and the most layers of each variant."""
    figure, both = pyplot.subplots(1, 2, figsize=(9, 3), layout="constrained")
    about = {
        "longest_sequence": f"longest sequence, tokens ({result['num_layers']} layers)",
        "most_layers": f"most layers (sequence {result['sequence_of_layers']})",
    }
    for axes, (key, label) in zip(both, about.items(), strict=True):
        found = {name: number for name, number in result["figures"][key].items() if number}
        ordered = sorted(found, key=lambda name: found[name])
        colors = [KINDS.get(name.partition(":")[0], "tab:orange") for name in ordered]
        axes.bar_label(axes.barh(ordered, [found[name] for name in ordered], color=colors, alpha=0.6), padding=2)
        axes.set_xlim(0, 1.2 * max(found.values(), default=1))
        axes.set_xlabel(label)
    figure.suptitle(f"{result['device']}: Qwen2.5-7B layers ({result['transformer_impl']})")
    _save(figure, path)


def draw_lengths(path: Path, result: Any) -> None:
    """Reserved memory of a whole model's steps by length; a cross on the card's limit where one did not fit."""
    figure, axes = pyplot.subplots(figsize=(8, 3.6), layout="constrained")
    limit_gib = result["device_memory_bytes"] / GIB
    labels = {"recompute: full": "layers recomputed", "ours: full recompute": "recomputed, their inputs offloaded"}
    styles = {"recompute: full": ("black", 7), "ours: full recompute": ("tab:blue", -16)}
    for variant, entry in result["sequence"].items():
        color, above = styles[variant]
        fits = {int(size): each for size, each in entry["tried"].items() if "out_of_memory" not in each}
        peaks_gib = [each["peak_reserved_bytes"] / GIB for each in fits.values()]
        axes.plot([*fits], peaks_gib, "o-", color=color, label=labels[variant])
        longest = max(fits)
        at = {"xytext": (0, above), "textcoords": "offset points", "ha": "center", "color": color}
        axes.annotate(f"{longest:,}", (longest, peaks_gib[[*fits].index(longest)]), **at)
        beyond = [int(size) for size in entry["tried"] if int(size) not in fits]
        axes.plot(beyond, [limit_gib] * len(beyond), "x", color=color, markersize=10, mew=2)
        for size in beyond:
            axes.annotate(f"{size:,} did not fit", (size, limit_gib), **at | {"xytext": (0, 8)})
    axes.axhline(limit_gib, color="tab:red", lw=1)
    axes.annotate("the card", (0, limit_gib), xytext=(4, 4), textcoords="offset points", color="tab:red")
    axes.set_xlim(0, 1.1 * max(int(size) for entry in result["sequence"].values() for size in entry["tried"]))
    axes.set_ylim(0, 1.2 * limit_gib)
    axes.set_xlabel("tokens of the sequence")
    axes.set_ylabel("GiB reserved")
    axes.legend(loc="lower right")
    name = result.get("of_model", MODEL).partition("/")[2]
    figure.suptitle(f"{result['device']}: {result['num_layers']} layers of {name}, optimizer on the host")
    _save(figure, path)


def draw_link(path: Path, result: Any) -> None:
    """Rates of copies by size: medians, and from the lowest to the highest sample."""
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    sizes_mib = [int(size.split()[0]) for size in result["copies_gb_per_s"]]
    for way in ("out", "in", "both"):
        rates = [each[way] for each in result["copies_gb_per_s"].values()]
        samples = [each[way] for each in result["copies_gb_per_s_samples"].values()]
        (line,) = axes.plot(sizes_mib, rates, "o-", label="both ways at once" if way == "both" else way)
        axes.fill_between(sizes_mib, [*map(min, samples)], [*map(max, samples)], color=line.get_color(), alpha=0.2)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes_mib, list(map(str, sizes_mib)))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("size of a copy, MiB")
    axes.set_ylabel("GB/s")
    axes.legend()
    axes.set_title(f"{result['device']}: copies between device and pinned host memory")
    _save(figure, path)


def draw_predictions(path: Path, results: Mapping[str, Any], found: Sequence[Prediction]) -> None:
    """E6: errors of predicted peaks and times by experiment, with the bars as lines."""
    figure, axes = pyplot.subplots(figsize=(9, 4), layout="constrained")
    experiments = sorted({results[each.source]["experiment"] for each in found})
    for offset, kind, color in ((-0.15, "memory", "tab:blue"), (0.15, "time", "tab:orange")):
        errors = [(results[each.source]["experiment"], getattr(each, f"{kind}_error")) for each in found]
        known = [(experiments.index(name) + offset, 100 * error) for name, error in errors if error is not None]
        axes.plot(*zip(*known, strict=True), "o", color=color, alpha=0.5, label=kind)
        for sign in (-1, 1):
            axes.axhline(sign * 100 * BARS[kind], color=color, linewidth=0.8, linestyle="--")
    axes.set_xticks(range(len(experiments)), experiments)
    axes.set_xlim(-0.5, len(experiments) - 0.5)
    axes.set_ylabel("predicted over measured, %")
    axes.legend()
    axes.set_title(f"{results[found[0].source]['device']}: the planner's errors; dashed: the bars")
    _save(figure, path)
