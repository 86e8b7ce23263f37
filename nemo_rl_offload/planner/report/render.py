"""A plan as data, as tables on a terminal, as one HTML page, and as a YAML overlay."""

import html
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table

from nemo_rl_offload.offload.solver import Action
from nemo_rl_offload.planner.job import Recompute
from nemo_rl_offload.planner.plan import JobPlan
from nemo_rl_offload.planner.search.to_config import excess_bytes
from nemo_rl_offload.planner.simulate.simulated_step import ModuleRow, SimulatedStep, module_rows
from nemo_rl_offload.planner.simulate.stages import job_link
from nemo_rl_offload.specs.recompute import RECOMPUTE_KEYS
from nemo_rl_offload.units import GIB, MIB


def plan_data(plan: JobPlan) -> dict[str, Any]:
    """Everything in a plan; bytes and milliseconds, by names that say so."""
    job, layout = plan.job, plan.job.layout
    hosts = [plan.chosen.host_bytes(rank) for rank in range(layout.pipeline)]
    return {
        "device": job.device.name,
        "budget_bytes": job.budget_bytes,
        "world": layout.world,
        "microbatches": job.num_microbatches,
        "fits": plan.shortfall_bytes == 0,
        "shortfall_bytes": plan.shortfall_bytes,
        "changes": list(plan.changes),
        "outcomes": {
            name: _outcome_data(outcome)
            for name, outcome in {
                "nothing_offloaded": plan.baseline,
                "as_configured": plan.configured,
                "chosen": plan.chosen,
                "written": plan.written.outcome,
            }.items()
            if outcome is not None
        },
        "megatron_cfg": plan.keys,
        "host": {
            "per_rank_bytes": max(hosts),
            "per_node_bytes": (max(hosts) + _reference_bytes(plan)) * job.node_ranks,
            "of_it_start_model_bytes": _reference_bytes(plan) * job.node_ranks,
            "pinned_limit_per_rank_bytes": job.host_budget_bytes,
            "memory_per_node_bytes": int(job.device.host_memory_gib * GIB) * job.node_ranks,
            "stash_per_rank_bytes": max(stage.stash_host_bytes for stage in plan.chosen.stages),
        },
        "recommended_factors": job.expert_buffers.recommended(),
        "stages": [_stage_data(plan, rank) for rank in range(layout.pipeline)],
        "frontier": [{"peak_bytes": point.peak_bytes, "step_ms": point.step_ms} for point in plan.frontier],
    }


def _reference_bytes(plan: JobPlan) -> int:
    if not plan.job.reference_on_host:
        return 0
    return max(stage.static_bytes["weights"] for stage in plan.baseline.stages)


def _outcome_data(outcome: SimulatedStep) -> dict[str, Any]:
    ranks = range(len(outcome.stages))
    return {
        "step_ms": round(outcome.step_ms, 3),
        "peak_bytes": max(outcome.peak_bytes(rank) for rank in ranks),
        "host_bytes": max(outcome.host_bytes(rank) for rank in ranks),
        "exposed_share": round(max(outcome.exposed_share(rank) for rank in ranks), 4),
    }


def _stage_data(plan: JobPlan, rank: int) -> dict[str, Any]:
    stage = plan.chosen.stages[rank]
    return {
        "stage": rank,
        "layers": [[chunk.start, chunk.stop] for chunk in stage.layers],
        "live_microbatches": list(stage.live),
        "static_bytes": stage.static_bytes,
        "peak_bytes_before": plan.baseline.peak_bytes(rank),
        "peak_bytes": plan.chosen.peak_bytes(rank),
        "host_bytes": plan.chosen.host_bytes(rank),
        "exposed_share": round(plan.chosen.exposed_share(rank), 4),
        "shortfall_bytes": plan.shortfalls[rank],
        "other_bytes_at_peak": stage.kept_bytes(),
        "modules": [_row_data(plan, row) for row in module_rows(plan.chosen, rank)],
    }


def _row_data(plan: JobPlan, row: ModuleRow) -> dict[str, Any]:
    link = job_link(plan.job)
    return {
        "module": row.module,
        "bytes_per_microbatch": row.num_bytes,
        "bytes_at_peak": row.live_bytes,
        "goes": _goes(row),
        "link_ms_per_microbatch": round(
            row.offloaded_bytes / link.out_bytes_per_ms + row.offloaded_bytes / link.in_bytes_per_ms, 3
        ),
        "recompute_ms_per_microbatch": round(row.recompute_ms, 3),
        "exposed_ms": round(row.exposed_ms, 3),
        "copies": _exposure(row),
    }


def _goes(row: ModuleRow) -> str:
    words = {Action.KEEP: "stays", Action.OFFLOAD: "host", Action.RECOMPUTE: "recomputed"}
    taken = [(words[action], len(places)) for action, places in sorted(row.places.items())]
    if len(taken) == 1:
        return taken[0][0]
    return f"{', '.join(f'{word} {count}' for word, count in taken)} of {row.num_layers}"


def _exposure(row: ModuleRow) -> str:
    if Action.OFFLOAD not in row.places:
        return "-"
    return "exposed" if row.exposed_ms > 0.01 else "hidden"


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f} GiB"


def summary_lines(plan: JobPlan) -> list[str]:
    """The plan in sentences: whether it fits, what it costs, what the host needs, what to change."""
    data, job = plan_data(plan), plan.job
    outcomes, host = data["outcomes"], data["host"]
    base = outcomes["nothing_offloaded"]
    size = f"{job.micro_batch} x {job.sequence}" if job.micro_batch_tokens is None else f"{job.micro_batch_tokens}"
    lines = [
        f"{job.device.name}, {job.layout.world} devices, {job.num_microbatches} microbatches of {size} tokens; "
        f"{_gib(job.budget_bytes)} each"
    ]
    titles = {
        "nothing_offloaded": "nothing offloaded",
        "as_configured": "as configured",
        "chosen": "chosen for the budget",
        "written": "as whole modules",
    }
    recomputed = {"chosen": _recomputed(plan.chosen_job.recompute), "written": _recomputed(plan.written.recompute)}
    for name, outcome in outcomes.items():
        change = 100 * (outcome["step_ms"] / base["step_ms"] - 1)
        lines.append(
            f"{titles[name]}: peak {_gib(outcome['peak_bytes'])}, step {outcome['step_ms'] / 1e3:.2f} s "
            f"({change:+.1f} %), host {_gib(outcome['host_bytes'])} per rank{recomputed.get(name, '')}"
        )
    lines.append(
        f"host memory per node: {_gib(host['per_node_bytes'])} of {_gib(host['memory_per_node_bytes'])}"
        + (f", {_gib(host['of_it_start_model_bytes'])} of it the start model" if job.reference_on_host else "")
        + f"; pinned {_gib(host['per_rank_bytes'])} per rank, at most {_gib(host['pinned_limit_per_rank_bytes'])}"
    )
    if host["stash_per_rank_bytes"]:
        lines.append(f"paged stash: {_gib(host['stash_per_rank_bytes'])} of pinned pages per rank besides")
    if factors := data["recommended_factors"]:
        lines.append("for this routing: " + "; ".join(f"{key}: {factor}" for key, factor in factors.items()))
    if job.any_implementation:
        lines.append("transformer_impl: auto is planned as torch, with modules that Transformer Engine has too")
    return lines + _verdict(plan)


def _recomputed(recompute: Recompute) -> str:
    if recompute.method is not None:
        return "; recomputes whole layers"
    if not recompute.modules:
        return ""
    counted = recompute.keys["recompute_num_layers"]
    return f"; recomputes {', '.join(sorted(recompute.modules))}{f' ({counted} layers)' if counted else ''}"


def _verdict(plan: JobPlan) -> list[str]:
    if plan.shortfall_bytes:
        rank = plan.shortfalls.index(plan.shortfall_bytes)
        short = (
            f"does not fit: stage {rank} needs {_gib(plan.chosen.peak_bytes(rank))}, "
            f"{_gib(plan.shortfall_bytes)} more than there is."
        )
        return [short, f"changes that would do: {'; or '.join(plan.changes)}"]
    keys = plan.keys
    words = [f"offload_modules: {_yaml(keys['offload_modules'])}"] if keys["offload_modules"] else []
    if "activation_offload" in keys:
        words.append(f"gpu_memory_budget: {keys['activation_offload']['gpu_memory_budget']}")
    words += [f"{key}: {_yaml(keys[key])}" for key in RECOMPUTE_KEYS if keys.get(key) is not None]
    if not words:
        return ["fits without offloading"]
    said = [f"fits with {'; '.join(words)}"]
    if plan.needs_layers_to_differ:
        whole = plan.written.outcome
        missing = f"need {_gib(excess)} more than there is" if (excess := excess_bytes(plan.job, whole)) else "fit"
        share = whole.step_ms / plan.chosen.step_ms - 1
        times = f"take {abs(share):.0%} {'longer' if share >= 0 else 'less time'}"
        said.append(f"whole modules ({_yaml(plan.written.offload_modules)}) would {missing} and {times}")
    return said


def _yaml(value: Any) -> str:
    return f"[{', '.join(value)}]" if isinstance(value, list | tuple) else str(value)


_COLUMNS = ("module", "microbatch", "at peak", "goes", "link", "recompute", "copies")


def plan_tables(plan: JobPlan) -> RenderableType:
    """What the terminal shows."""
    shown: list[RenderableType] = [*summary_lines(plan), *_frontier_table(plan)]
    for stage in plan_data(plan)["stages"]:
        table = _table(_COLUMNS, right=(1, 2, 4, 5))
        for cells in _stage_cells(stage):
            table.add_row(*cells)
        shown += [f"\n{line}" for line in _stage_lines(stage)] + [table]
    return Group(*shown)


def _table(columns: Sequence[str], right: Sequence[int]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number in right else "left", no_wrap=True)
    return table


def _frontier_table(plan: JobPlan) -> Iterator[RenderableType]:
    """Time at other budgets; the point marked is the last that fits, or else the first."""
    points = plan.frontier
    fitting = [point for point in points if point.peak_bytes <= plan.job.budget_bytes]
    table = _table(("memory", "step", "of nothing offloaded's", ""), right=(0, 1, 2))
    for point in points:
        mark = "nearest to the budget" if point == (fitting[-1] if fitting else points[0]) else ""
        ratio = point.step_ms / plan.baseline.step_ms
        table.add_row(_gib(point.peak_bytes), f"{point.step_ms / 1e3:.2f} s", f"{ratio:.3f}", mark)
    yield "\nleast time at other budgets, estimated but for the choice"
    yield table


def _stage_lines(stage: dict[str, Any]) -> list[str]:
    layers = ", ".join(f"{start}-{stop - 1}" for start, stop in stage["layers"])
    static = ", ".join(f"{name} {size / GIB:.1f}" for name, size in stage["static_bytes"].items())
    return [
        f"stage {stage['stage']}: layers {layers}; peak {_gib(stage['peak_bytes_before'])} -> "
        f"{_gib(stage['peak_bytes'])}, host {_gib(stage['host_bytes'])}, waits {100 * stage['exposed_share']:.1f} %\n"
        f"  not activations, GiB: {static}"
    ]


def _stage_cells(stage: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for row in stage["modules"]:
        yield (
            row["module"],
            f"{row['bytes_per_microbatch'] / MIB:.0f} MiB",
            _gib(row["bytes_at_peak"]),
            row["goes"],
            *(
                f"{ms:.1f} ms" if ms else ""
                for ms in (row["link_ms_per_microbatch"], row["recompute_ms_per_microbatch"])
            ),
            row["copies"],
        )
    yield "other", "", _gib(stage["other_bytes_at_peak"]), "stays", "", "", "-"


def plan_html(plan: JobPlan) -> str:
    """One page that needs nothing else."""
    head = "".join(f"<th>{name}</th>" for name in _COLUMNS)
    stages = ""
    for stage in plan_data(plan)["stages"]:
        rows = "".join(
            f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in cells)}</tr>\n" for cells in _stage_cells(stage)
        )
        lines = "".join(f"<p>{html.escape(line)}</p>" for line in _stage_lines(stage))
        stages += f"{lines}\n<table><tr>{head}</tr>\n{rows}</table>\n"
    said = "".join(f"<p>{html.escape(line)}</p>\n" for line in summary_lines(plan))
    style = (
        "body{font:15px sans-serif;margin:2em;max-width:70em}table{border-collapse:collapse}p{white-space:pre-line}"
        "td,th{padding:.2em .7em;border-bottom:1px solid #ddd;text-align:left}"
    )
    return (
        f"<!doctype html>\n<html lang='en'><meta charset='utf-8'><title>Offloading plan</title><style>{style}</style>\n"
        f"<h1>Offloading plan</h1>\n{said}<h2>Memory against step time</h2>\n{_frontier_svg(plan)}\n"
        f"<h2>By pipeline stage</h2>\n{stages}</html>\n"
    )


def _merged(content: Mapping[str, Any], added: Mapping[str, Any]) -> dict[str, Any]:
    """Sections that both have are joined."""
    both = {
        key: _merged(content[key], value)
        for key, value in added.items()
        if isinstance(value, Mapping) and isinstance(content.get(key), Mapping)
    }
    return {**content, **added, **both}


def _frontier_svg(plan: JobPlan) -> str:
    """Peak memory of the fullest stage against step time, and the budget as a line."""
    width, height, left, bottom = 640, 320, 70, 40
    found = plan.frontier
    peaks = [point.peak_bytes / GIB for point in found]
    times = [point.step_ms / 1e3 for point in found]
    budget = plan.job.budget_bytes / GIB
    low, high = min(*peaks, budget), max(*peaks, budget)
    fast, slow = min(times), max(times)

    def x(peak: float) -> float:
        return left + (peak - low) / max(high - low, 1e-9) * (width - left - 20)

    def y(seconds: float) -> float:
        return height - bottom - (seconds - fast) / max(slow - fast, 1e-9) * (height - bottom - 30)

    points = list(zip(peaks, times, strict=True))
    line = " ".join(f"{x(peak):.1f},{y(seconds):.1f}" for peak, seconds in points)
    marks = "".join(
        f"<circle cx='{x(peak):.1f}' cy='{y(seconds):.1f}' r='4'>"
        f"<title>{peak:.1f} GiB, {seconds:.2f} s</title></circle>"
        for peak, seconds in points
    )
    labels = "".join(
        f"<text x='{x(peak):.1f}' y='{height - bottom + 18}' text-anchor='middle'>{peak:.0f}</text>"
        for peak in (low, high)
    ) + "".join(f"<text x='{left - 8}' y='{y(s) + 4:.1f}' text-anchor='end'>{s:.2f} s</text>" for s in {fast, slow})
    return (
        f"<svg viewBox='0 0 {width} {height}' width='{width}' font-size='13' fill='#333'>"
        f"<line x1='{x(budget):.1f}' x2='{x(budget):.1f}' y1='20' y2='{height - bottom}' stroke='#c33' "
        f"stroke-dasharray='5'/><text x='{x(budget):.1f}' y='14' text-anchor='middle'>budget</text>"
        f"<polyline points='{line}' fill='none' stroke='#36c' stroke-width='2'/>{marks}{labels}"
        f"<text x='{width / 2}' y='{height - 6}' text-anchor='middle'>peak device memory, GiB</text></svg>"
    )


def plan_overlay(
    plan: JobPlan, config: Path, overlay: Path, overrides: Sequence[str] = (), changed: Mapping[str, Any] | None = None
) -> str:
    """A configuration that inherits `config`, has what the `overrides` of the plan `changed`, and adds the plan's keys;
    `overlay` is where it will stand."""
    content = {"defaults": os.path.relpath(config, overlay.parent), **(changed or {})}
    content = _merged(content, {"policy": {"megatron_cfg": plan.keys}})
    said = "\n".join(f"# {line}" for line in summary_lines(plan))
    given = f"# planned with: {' '.join(overrides)}\n" if overrides else ""
    return f"# Written by `nemo-rl-offload plan`.\n{said}\n{given}{yaml.safe_dump(content, sort_keys=False)}"
