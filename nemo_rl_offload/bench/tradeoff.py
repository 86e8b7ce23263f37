"""The picture of device memory against step time, one point a variant."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from nemo_rl_offload.runs.output import written_aside
from nemo_rl_offload.units import GIB

LOGARITHMIC_FROM = 2.0
"""Ratio of the longest time to the shortest from which the axis of time is logarithmic."""


class Point(NamedTuple):
    name: str
    peak_bytes: int
    step_ms: float
    color: str


def draw_tradeoff(path: Path, title: str, points: Sequence[Point]) -> None:
    """Write a PNG aside, then rename. Points have numbers in the order of their memory, and a list beside the picture
    names them: names of points that are close would cover each other.

    Raises:
        ResourceError: it cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    figure, axes = pyplot.subplots(figsize=(9, 5), layout="constrained")
    for number, point in enumerate(sorted(points, key=lambda point: (point.peak_bytes, point.step_ms)), 1):
        at = point.peak_bytes / GIB, point.step_ms
        axes.plot(*at, "o", color=point.color, label=f"{number}  {point.name}")
        above = 5 if number % 2 else -12
        axes.annotate(str(number), at, xytext=(0, above), textcoords="offset points", ha="center", fontsize=7)
    times = [point.step_ms for point in points]
    if times and max(times) > LOGARITHMIC_FROM * min(times):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 1.5, 2, 3, 4, 5, 7)))
        axes.yaxis.set_minor_locator(ticker.NullLocator())
        axes.yaxis.set_major_formatter(ticker.ScalarFormatter())
    axes.set_xlabel("peak device memory, GiB")
    axes.set_ylabel("step, ms")
    axes.set_title(title)
    if points:
        figure.legend(loc="outside right upper", fontsize=7, handletextpad=0.2, frameon=False)
    with written_aside(path) as file:
        figure.savefig(file, dpi=120, format="png")
    pyplot.close(figure)
