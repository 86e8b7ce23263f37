"""What `plan` chooses for E2, beside what was measured. Needs no GPU.

At the peak of each recomputation that E2 measured, the planner chooses for that much memory, with the device's rates
fitted to the step without anything, as E6 has them. Beside that choice's predicted time stands the best measured one of
ours that needs no more, and the choice's own time where E2 ran it (`dense_rl.py --planned RESULT`).
"""

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from frontier import levels, points
from predictions import device_of, fitted, runs_of_e2

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
    keys: Mapping[str, Any] | None
    """What is planned, in `policy.megatron_cfg`; None: nothing fits, by the planner's word."""
    planned_ms: float
    run_ms: float | None
    """None: not run with these keys."""
    run_peak_bytes: int | None

    @property
    def name(self) -> str:
        """Of the variant that runs it."""
        return f"ours: plan for {self.rival}"


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
    found = _choices(json.loads(path.read_text(encoding="utf-8")), path)
    return [(each.name, each.keys) for each in found if each.keys and each.keys["offload_modules"]]


def _choices(result: Mapping[str, Any], path: Path) -> Iterator[Choice]:
    first = next(iter(runs_of_e2(result, path.stem, device_of(result, path.parent))))
    device, optimizer_ms = fitted(first), result["optimizer_ms"]
    allowances = sum(allowance_bytes(device).values())
    for level in levels(points(result["variants"]), ("recompute",)):
        plan = make_plan(replace(first.job, device=device, memory_bytes=level.peak_bytes + allowances))
        best_ms = None if level.ours_ms is None else level.ours_ms - optimizer_ms
        keys = None if plan.shortfall_bytes else plan.keys
        own = _run(result, keys)
        yield Choice(
            first.source,
            level.rival,
            level.peak_bytes,
            level.rival_ms - optimizer_ms,
            level.ours,
            best_ms,
            keys,
            plan.written.outcome.step_ms,
            None if own is None else own["ms"] - optimizer_ms,
            None if own is None else int(own["peak_allocated_bytes"]),
        )


def _run(result: Mapping[str, Any], keys: Mapping[str, Any] | None) -> Mapping[str, float] | None:
    """Medians of the variant with these keys."""
    for each in result["variants"]:
        if keys is not None and each.get("keys") == keys and "medians" in each:
            return each["medians"]
    return None


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
        own = "- | -"
        if each.run_ms is not None and each.run_peak_bytes is not None:
            own = f"{each.run_ms:.1f} ms | {each.run_peak_bytes / 2**30:.2f} GiB"
        yield (
            f"| {each.source} | {each.rival} | {each.peak_bytes / 2**30:.2f} GiB | {each.rival_ms:.1f} ms "
            f"| {best} | {planned} | {ratio} | {own} |"
        )
