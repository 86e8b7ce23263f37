"""Where a card's memory goes, phase by phase, and a rank's host memory, as bars in SVG."""

from collections.abc import Mapping
from html import escape

from nemo_rl_offload.planner.report.data import PlanData
from nemo_rl_offload.units import gib

COLOURS = {
    "weights": "#2563a8",
    "gradients": "#d9822b",
    "optimizer": "#3c8f5a",
    "activations": "#a33b3b",
    "logits": "#9b4f96",
    "output head": "#9b4f96",
    "reference weights": "#1f8a8a",
    "teacher": "#8a6d1f",
    "keys and values": "#c2577a",
    "vLLM's engine": "#c2577a",
    "runtime": "#9ca3af",
    "fragmentation": "#d1d5db",
}
OTHER = "#6b7280"
LEFT, WIDTH, RIGHT, ROW, BAR = 190, 640, 80, 26, 18


def phases_svg(data: PlanData) -> str:
    """A bar for each phase of the device, with the budget as a line; below, one for a rank's host memory."""
    rows = [(phase["phase"], phase["parts"]) for phase in data["phases"]]
    host = data["host"]
    most = max(data["budget_bytes"], *(sum(parts.values()) for _, parts in rows))
    parts = [_row(number, name, sizes, most) for number, (name, sizes) in enumerate(rows)]
    bottom = len(rows) * ROW
    parts.append(_limit(data["budget_bytes"] / most, 0, bottom))
    on_host = host["parts"] | host["beside"]
    host_most = max(host["budget_per_rank_bytes"], sum(on_host.values()))
    parts.append(_row(len(rows) + 0.6, "a rank's host memory", on_host, host_most))
    top = bottom + 0.6 * ROW
    parts.append(_limit(host["budget_per_rank_bytes"] / host_most, top, top + ROW))
    names = list(dict.fromkeys(name for _, sizes in [*rows, ("", on_host)] for name in sizes))
    legend = "".join(
        f"<rect x='{LEFT + (number % 4) * 155}' y='{top + (number // 4 + 1.7) * 20:.0f}' width='11' height='11' "
        f"fill='{COLOURS.get(name, OTHER)}'/><text x='{LEFT + (number % 4) * 155 + 16}' "
        f"y='{top + (number // 4 + 1.7) * 20 + 10:.0f}'>{escape(name)}</text>"
        for number, name in enumerate(names)
    )
    width, height = LEFT + WIDTH + RIGHT, top + ((len(names) - 1) // 4 + 3) * 20
    frame = f"viewBox='0 0 {width} {height:.0f}' width='100%' font-size='12' fill='#333'"
    return f"<svg {frame}>{''.join(parts)}{legend}</svg>"


def _row(number: float, title: str, sizes: Mapping[str, int], most: int) -> str:
    y, x = number * ROW + 4, float(LEFT)
    found = [f"<text x='{LEFT - 8}' y='{y + 13:.1f}' text-anchor='end'>{escape(title)}</text>"]
    for name, size in sizes.items():
        width = size / most * WIDTH
        found.append(
            f"<rect x='{x:.1f}' y='{y:.1f}' width='{width:.1f}' height='{BAR}' fill='{COLOURS.get(name, OTHER)}'>"
            f"<title>{escape(name)}: {gib(size)}</title></rect>"
        )
        x += width
    found.append(f"<text x='{x + 6:.1f}' y='{y + 13:.1f}'>{gib(sum(sizes.values()))}</text>")
    return "".join(found)


def _limit(share: float, top: float, bottom: float) -> str:
    x = LEFT + share * WIDTH
    return (
        f"<line x1='{x:.1f}' x2='{x:.1f}' y1='{top:.1f}' y2='{bottom:.1f}' stroke='#c33' stroke-width='2' "
        "stroke-dasharray='5'><title>budget</title></line>"
    )
