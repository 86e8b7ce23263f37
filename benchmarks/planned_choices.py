"""What `plan` would have chosen for E2, beside what was measured. Needs no GPU.

At the peak of each recomputation that E2 measured, the planner chooses for that much memory, with the device's rates
fitted to the step without anything, as E6 has them. Beside that choice's predicted time stands the best measured one of
ours that needs no more: those were mixed by hand, and the choice itself was not run.
"""

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from frontier import Point, levels, points
from predictions import Run, device_of, fitted, runs_of_e2

from nemo_rl_offload.planner.memory import allowance_bytes
from nemo_rl_offload.planner.plan import make_plan


@dataclass(frozen=True)
class Choice:
    """What `plan` chooses for the memory of one of E2's rivals, beside the best of ours that was measured there."""

    source: str
    rival: str
    peak_bytes: int
    rival_ms: float
    best: str | None
    """None: nothing of ours that was measured needs so little."""
    best_ms: float | None
    planned: str | None
    """Keys of `policy.megatron_cfg`; None: nothing fits, by the planner's word."""
    planned_ms: float


@functools.cache
def choices(folder: Path) -> list[Choice]:
    """For recomputation in the first result of each cell of E2; times without the optimizer's part."""
    found: list[Choice] = []
    for path in sorted(folder.glob("dense_*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        if path.stem.endswith(result["shape"]["transformer_impl"]) and result["device_memory_bytes"]:
            runs = list(runs_of_e2(result, path.stem, device_of(result, folder)))
            found += _choices(runs[0], points(result["variants"]), result["optimizer_ms"])
    return found


def _choices(first: Run, measured: Sequence[Point], optimizer_ms: float) -> Iterator[Choice]:
    device = fitted(first)
    allowances = sum(allowance_bytes(device).values())
    for level in levels(measured, ("recompute",)):
        plan = make_plan(replace(first.job, device=device, memory_bytes=level.peak_bytes + allowances))
        best_ms = None if level.ours_ms is None else level.ours_ms - optimizer_ms
        planned = None if plan.shortfall_bytes else _keys(plan.keys)
        yield Choice(
            first.source,
            level.rival,
            level.peak_bytes,
            level.rival_ms - optimizer_ms,
            level.ours,
            best_ms,
            planned,
            plan.written.outcome.step_ms,
        )


def _keys(keys: Mapping[str, Any]) -> str:
    offloaded = keys["offload_modules"]
    said = "auto" if offloaded == "auto" else ", ".join(offloaded) or "nothing"
    recomputed = "whole layers" if keys.get("recompute_method") else ", ".join(keys.get("recompute_modules") or ())
    number = keys.get("recompute_num_layers") if keys.get("recompute_modules") else None
    return said + (f"; recomputed: {recomputed}" if recomputed else "") + (f" ({number} layers)" if number else "")


def table(found: Sequence[Choice]) -> Iterator[str]:
    """Markdown."""
    yield "| result | at the peak of | memory | its step | best of ours, measured | | `plan` | | over measured |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for each in found:
        ratio = "-" if each.best_ms is None or each.planned is None else f"{each.planned_ms / each.best_ms - 1:+.1%}"
        best = "- | -" if each.best_ms is None else f"{each.best} | {each.best_ms:.1f} ms"
        planned = "nothing fits | -" if each.planned is None else f"{each.planned} | {each.planned_ms:.1f} ms"
        yield (
            f"| {each.source} | {each.rival} | {each.peak_bytes / 2**30:.2f} GiB | {each.rival_ms:.1f} ms "
            f"| {best} | {planned} | {ratio} |"
        )
