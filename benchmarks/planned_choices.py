"""What `plan` chooses for E2, beside what was measured. Needs no GPU.

At the peak of each recomputation that E2 measured, the planner chooses for that much memory, with the device's rates
fitted to the step without anything, as E6 has them. Beside that choice's predicted time stands the best measured one of
ours that needs no more, mixed by hand. Where E2 ran what `plan` had chosen for an earlier result of the cell
(`dense_rl.py --planned RESULT`), that is the choice, and its measured time and peak stand beside it.
"""

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from frontier import levels, points
from predictions import Figures, device_of, fitted, predict, runs_of_e2

from nemo_rl_offload.planner.cost.memory import allowance_bytes
from nemo_rl_offload.planner.job import Job
from nemo_rl_offload.planner.plan import make_plan
from nemo_rl_offload.units import gib


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
    keys: Mapping[str, Any] | None
    """What is planned, in `policy.megatron_cfg`; None: nothing fits, by the planner's word."""
    planned_ms: float
    run: Figures | None
    """Of a run with these keys."""

    @property
    def name(self) -> str:
        return variant_name(self.rival)


def variant_name(rival: str) -> str:
    """Of the variant that runs a choice."""
    return f"ours: plan for {rival}"


@functools.cache
def choices(folder: Path) -> list[Choice]:
    """For recomputation in the first result of each cell of E2; times without the optimizer's part."""
    found: list[Choice] = []
    for path in sorted(folder.glob("dense_*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        if path.stem.endswith(result["shape"]["transformer_impl"]) and result["device_memory_bytes"]:
            found += _choices(result, path)
    return found


def named_choices(path: Path) -> list[tuple[str, Mapping[str, Any]]]:
    """Names and keys of what one result of E2 makes `plan` choose; those that offload nothing are left out."""
    result = json.loads(path.read_text(encoding="utf-8"))
    found = _choices({**result, "variants": _mixed_by_hand(result)}, path)
    return [(each.name, each.keys) for each in found if each.keys and each.keys["offload_modules"]]


def _mixed_by_hand(result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The variants that `plan` did not choose."""
    return [each for each in result["variants"] if not each.get("keys")]


def _choices(result: Mapping[str, Any], path: Path) -> Iterator[Choice]:
    runs = {run.variant: run for run in runs_of_e2(result, path.stem, device_of(result, path.parent))}
    first, optimizer_ms = next(iter(runs.values())), result["optimizer_ms"]
    device = fitted(first)
    keys_that_ran = {each["name"]: each["keys"] for each in result["variants"] if each.get("keys")}
    for level in levels(points(_mixed_by_hand(result)), ("recompute",)):
        name = variant_name(level.rival)
        run = runs.get(name)
        if run is None:
            keys, planned_ms = _plan(replace(first.job, device=device), level.peak_bytes)
        else:
            keys, planned_ms = keys_that_ran[name], predict(run, device)[1]
        yield Choice(
            first.source,
            level.rival,
            level.peak_bytes,
            level.rival_ms - optimizer_ms,
            level.ours,
            None if level.ours_ms is None else level.ours_ms - optimizer_ms,
            keys,
            planned_ms,
            None if run is None else run.measured,
        )


def _plan(job: Job, peak_bytes: int) -> tuple[Mapping[str, Any] | None, float]:
    plan = make_plan(replace(job, memory_bytes=peak_bytes + sum(allowance_bytes(job.device).values())))
    return None if plan.shortfall_bytes else plan.keys, plan.chosen.step_ms


def _said(keys: Mapping[str, Any]) -> str:
    offloaded = keys["offload_modules"]
    said = "auto" if offloaded == "auto" else ", ".join(offloaded) or "nothing"
    recomputed = "whole layers" if keys.get("recompute_method") else ", ".join(keys.get("recompute_modules") or ())
    number = keys.get("recompute_num_layers") if keys.get("recompute_modules") else None
    return said + (f"; recomputed: {recomputed}" if recomputed else "") + (f" ({number} layers)" if number else "")


def table(found: Sequence[Choice]) -> Iterator[str]:
    """Markdown."""
    yield (
        "| result | at the peak of | memory | its step | best of ours, measured | | `plan` | predicted | over measured "
        "| its own run | its peak |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|---|"
    for each in found:
        ratio = "-" if each.best_ms is None or each.keys is None else f"{each.planned_ms / each.best_ms - 1:+.1%}"
        best = "- | -" if each.best_ms is None else f"{each.best} | {each.best_ms:.1f} ms"
        planned = "nothing fits | -" if each.keys is None else f"{_said(each.keys)} | {each.planned_ms:.1f} ms"
        own = f"{each.run.ms:.1f} ms | {gib(each.run.peak_bytes, 2)}" if each.run else "- | -"
        yield (
            f"| {each.source} | {each.rival} | {gib(each.peak_bytes, 2)} | {each.rival_ms:.1f} ms "
            f"| {best} | {planned} | {ratio} | {own} |"
        )
