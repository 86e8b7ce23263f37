"""A bench's figures as a table, as JSON, and as a picture of memory against time."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.table import Table

from nemo_rl_offload.bench.offload import Figures, Results
from nemo_rl_offload.bench.tradeoff import Point, draw_tradeoff
from nemo_rl_offload.runs.output import written_aside
from nemo_rl_offload.units import human_bytes


def table(figures: Sequence[Figures], means_something: bool) -> Table:
    """One row a variant; times relative to the first, which is without offloading."""
    note = "" if means_something else " (a small case on the CPU: shows that it works, its figures mean nothing)"
    result = Table(title=f"Offloading bench{note}")
    for name in ("variant", "step", "time", "peak", "reserved", "saved", "effective", "moved", "waited", "same bits"):
        result.add_column(name, justify="left" if name == "variant" else "right")
    for each in figures:
        if each.error is not None:
            result.add_row(each.name, each.error.split(". ")[0])  # all of it is in the JSON
            continue
        result.add_row(
            each.name,
            f"{each.step_ms:.1f} ms",
            f"{each.step_ms / figures[0].step_ms:.3f}" if figures[0].error is None else "-",
            human_bytes(each.peak_allocated_bytes or None),
            human_bytes(each.peak_reserved_bytes or None),
            human_bytes(each.saved_bytes or None),
            "-" if each.effectiveness is None else f"{each.effectiveness:.3f}",
            human_bytes(each.bytes_out or None),
            f"{each.stall_ms:.1f} ms",
            "yes" if each.bit_identical else "NO",
        )
    return result


def write_json(path: Path, data: Mapping[str, object], indent: int | None = 1) -> Path:
    """Write it aside, then rename; returns its path. Without `indent` all of it is one line.

    Raises:
        ResourceError: it cannot be written.
    """
    with written_aside(path) as file:
        file.write((json.dumps(data, indent=indent) + "\n").encode())
    return path


def plot(path: Path, data: Results, figures: Sequence[Figures]) -> None:
    """Write the picture of device memory against step time. Raises ResourceError: it cannot be written."""
    points = []
    for each in figures:
        if each.error is None:
            color = "tab:blue" if each.name.startswith("ours") else "black" if each.name == "none" else "tab:orange"
            points.append(Point(each.name, each.peak_allocated_bytes or each.bytes_out, each.step_ms, color))
    shape = data["shape"]
    draw_tradeoff(path, f"{data['device']}, {shape['num_layers']} layers, {shape['sequence_length']} tokens", points)
