"""A plan as one HTML page that needs nothing else."""

import html
from collections.abc import Iterable, Sequence

from nemo_rl_offload.planner.plan import JobPlan
from nemo_rl_offload.planner.report.data import plan_data
from nemo_rl_offload.planner.report.phases_svg import phases_svg
from nemo_rl_offload.planner.report.tables import (
    COLUMNS,
    PHASE_COLUMNS,
    phase_cells,
    stage_cells,
    stage_lines,
    summary_lines,
)
from nemo_rl_offload.units import GIB


def plan_html(plan: JobPlan) -> str:
    """The page."""
    data, stages = plan_data(plan), ""
    for stage in data["stages"]:
        lines = "".join(f"<p>{html.escape(line)}</p>" for line in stage_lines(stage))
        stages += f"{lines}\n{_table(COLUMNS, stage_cells(stage))}"
    said = "".join(f"<p>{html.escape(line)}</p>\n" for line in summary_lines(plan))
    style = (
        "body{font:15px sans-serif;margin:2em;max-width:70em}table{border-collapse:collapse}p{white-space:pre-line}"
        "td,th{padding:.2em .7em;border-bottom:1px solid #ddd;text-align:left}"
    )
    return (
        f"<!doctype html>\n<html lang='en'><meta charset='utf-8'><title>Offloading plan</title><style>{style}</style>\n"
        f"<h1>Offloading plan</h1>\n{said}<h2>Device memory by phase</h2>\n{phases_svg(data)}\n"
        f"{_table(PHASE_COLUMNS, phase_cells(data['phases']))}"
        f"<h2>Memory against step time</h2>\n{_frontier_svg(plan)}\n"
        f"<h2>By pipeline stage</h2>\n{stages}</html>\n"
    )


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{name}</th>" for name in columns)
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in cells)}</tr>\n" for cells in rows)
    return f"<table><tr>{head}</tr>\n{body}</table>\n"


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
