"""Line charts and bars as SVG text, for pages that need nothing else."""

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

COLOURS = ("#2563a8", "#d9822b", "#3c8f5a", "#9b4f96", "#a33b3b", "#6b7280", "#1f8a8a", "#8a6d1f")
MARKED = 12
"""Lines of at most so many points show each."""
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 420, 230, 64, 14, 12, 34
LEGEND_ROW, LEGEND_COLUMNS = 18, 3
SMALLEST, LARGEST = 1e-300, 1e300

Series = Mapping[str, Sequence[tuple[float, float]]]


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers, some `count` of them, from the first at or above `low` to the last at or below `high`."""
    if low == high:
        return [low]
    raw = (high - low) / count
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * magnitude for factor in (1, 2, 2.5, 5, 10) if factor * magnitude >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def _drawn(value: float) -> float:
    """Where a value is drawn: differences and shares of any two are floats too."""
    return 0.0 if abs(value) < SMALLEST else max(-LARGEST, min(LARGEST, value))


def line_chart(series: Series, x_label: str, show: Callable[[float], str] = "{:g}".format, unit: float = 10.0) -> str:
    """Lines over a common axis; a legend where there are several. Values that are not finite must be left out.

    `show` writes a value; its round numbers are those of a power of `unit`, as 1024 for bytes.
    """
    points = [point for line in series.values() for point in line]
    xs, ys = [_drawn(x) for x, _ in points], [_drawn(y) for _, y in points]
    low, high = min(ys), max(ys)
    margin = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    low, high = low - margin if low < 0 or low > margin else 0.0, high + margin
    left_x, right_x = min(xs), max(xs)
    columns = min(len(series), LEGEND_COLUMNS)
    legend_height = LEGEND_ROW * math.ceil(len(series) / LEGEND_COLUMNS) if len(series) > 1 else 0

    def px(x: float) -> float:
        return LEFT + (_drawn(x) - left_x) / ((right_x - left_x) or 1.0) * (WIDTH - LEFT - RIGHT)

    def py(y: float) -> float:
        return HEIGHT - BOTTOM - (_drawn(y) - low) / (high - low) * (HEIGHT - BOTTOM - TOP - legend_height)

    scale = 1.0 if unit == 10 or high < unit else unit ** math.floor(math.log(high, unit))
    parts = [
        f"<line x1='{LEFT}' x2='{WIDTH - RIGHT}' y1='{py(y):.1f}' y2='{py(y):.1f}' class='grid'/>"
        f"<text x='{LEFT - 6}' y='{py(y) + 4:.1f}' text-anchor='end'>{escape(show(y))}</text>"
        for y in (scale * tick for tick in ticks(low / scale, high / scale))
    ]
    parts += [
        f"<text x='{px(x):.1f}' y='{HEIGHT - BOTTOM + 16}' text-anchor='middle'>{x:g}</text>"
        for x in ticks(left_x, right_x)
    ]
    parts.append(f"<text x='{(LEFT + WIDTH) / 2}' y='{HEIGHT - 3}' text-anchor='middle'>{escape(x_label)}</text>")
    for number, (name, line) in enumerate(series.items()):
        colour = COLOURS[number % len(COLOURS)]
        path = " ".join(f"{px(x):.1f},{py(y):.1f}" for x, y in line)
        parts.append(f"<polyline points='{path}' fill='none' stroke='{colour}' stroke-width='1.8'/>")
        for x, y in line if len(line) <= MARKED else line[-1:]:
            parts.append(
                f"<circle cx='{px(x):.1f}' cy='{py(y):.1f}' r='3' fill='{colour}'>"
                f"<title>{escape(name)}: {escape(show(y))}</title></circle>"
            )
        if legend_height:
            x, y = LEFT + number % columns * (WIDTH - LEFT) / columns, TOP + number // columns * LEGEND_ROW
            parts.append(f"<rect x='{x:.0f}' y='{y - 8}' width='10' height='10' fill='{colour}'/>")
            parts.append(f"<text x='{x + 14:.0f}' y='{y + 1}'>{escape(name)}</text>")
    return f"<svg viewBox='0 0 {WIDTH} {HEIGHT}' width='100%'>{''.join(parts)}</svg>"


def bar(values: Mapping[str, float], width: int = 860) -> str:
    """One bar divided in proportion to the values, with a legend of names and shares."""
    total = sum(values.values()) or 1.0
    parts, legend, x = [], [], 0.0
    for number, (name, value) in enumerate(values.items()):
        colour, share = COLOURS[number % len(COLOURS)], value / total
        parts.append(
            f"<rect x='{x:.1f}' y='0' width='{max(share * width, 0.5):.1f}' height='26' fill='{colour}'>"
            f"<title>{escape(name)}: {share:.1%}</title></rect>"
        )
        legend.append(f"<span><i style='background:{colour}'></i>{escape(name)} {share:.1%}</span>")
        x += share * width
    drawing = (
        f"<svg viewBox='0 0 {width} 26' width='100%' height='26' preserveAspectRatio='none'>{''.join(parts)}</svg>"
    )
    return f"{drawing}<p class='legend'>{''.join(legend)}</p>"
