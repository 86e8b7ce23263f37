"""Draw a trace of `logger.profile` as Perfetto shows it: `python tools/trace_picture.py TRACE.json.gz PICTURE.png`.

Above stands the whole step: its phases, and what each thread of the worker ran. Below stands one part of the training
phase larger, from the first forward to the first backward, where operators can be told from each other.
"""

import gzip
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

PHASES = "phases of the step"
NUM_THREADS, MIN_SHARE, DEPTH = 3, 0.01, 6
"""Of a trace, those that ran most, if that is such a share of all; and of each, how many operators inside of one
another."""
ZOOM_MS = 6.0
COLOURS = ("#2563a8", "#d9822b", "#3c8f5a", "#9b4f96", "#a33b3b", "#6b7280", "#1f8a8a", "#8a6d1f")


class Slice(NamedTuple):
    """A bar: times in milliseconds, and how many bars it stands below."""

    name: str
    begin_ms: float
    end_ms: float
    depth: int


def tracks(trace: Path) -> dict[str, list[Slice]]:
    """The phases, and the threads that ran most, each from left to right."""
    with gzip.open(trace, "rt") as file:
        events = [each for each in json.load(file)["traceEvents"] if each.get("ph") == "X" and each.get("dur", 0) > 0]
    by_thread: dict[Any, list[Any]] = defaultdict(list)
    for event in events:
        if event.get("cat") != "Trace":
            by_thread[PHASES if event.get("cat") == "phase" else event["tid"]].append(event)
    start = min(each["ts"] for each in by_thread[PHASES])
    found = {PHASES: list(_nested(by_thread.pop(PHASES), start))}
    most = [
        each
        for each in sorted(by_thread.values(), key=len, reverse=True)[:NUM_THREADS]
        if len(each) >= MIN_SHARE * len(events)
    ]
    return found | {f"thread {number}": list(_nested(each, start)) for number, each in enumerate(most, start=1)}


def _nested(events: Sequence[Any], start: float) -> Iterator[Slice]:
    """Of events that hold one another, how deep each is."""
    ends: list[float] = []
    for event in sorted(events, key=lambda each: (each["ts"], -each["dur"])):
        while ends and ends[-1] <= event["ts"]:
            ends.pop()
        if len(ends) < DEPTH:
            begin = (event["ts"] - start) / 1e3
            yield Slice(event["name"], begin, begin + event["dur"] / 1e3, len(ends))
        ends.append(event["ts"] + event["dur"])


def draw(found: dict[str, list[Slice]], picture: Path) -> None:
    """Write the picture."""
    phases = found[PHASES]
    train = next(each for each in phases if each.name == "train")
    middle = next(
        each.begin_ms
        for name, slices in found.items()
        if name != PHASES
        for each in sorted(slices, key=lambda each: each.begin_ms)
        if each.begin_ms > train.begin_ms and "Backward" in each.name
    )
    whole = (min(each.begin_ms for each in phases), max(each.end_ms for each in phases))
    colours: dict[str, str] = {}
    figure, panels = pyplot.subplots(2, 1, figsize=(10, 4.6), height_ratios=(1, 1))
    for axes, (left, right) in zip(panels, (whole, (middle - ZOOM_MS, middle + ZOOM_MS)), strict=True):
        _panel(axes, found, left, right, colours)
    panels[0].set_title("a step of grpo_tiny", loc="left", fontsize=10)
    panels[1].set_title("where its first backward begins", loc="left", fontsize=10)
    panels[1].set_xlabel("ms since the step began")
    figure.tight_layout()
    figure.savefig(picture, dpi=90, metadata={"Software": None})


def _panel(axes: Any, found: dict[str, list[Slice]], left: float, right: float, colours: dict[str, str]) -> None:
    ticks: dict[str, float] = {}
    row = 0
    for name, slices in found.items():
        seen = [each for each in slices if each.end_ms > left and each.begin_ms < right]
        for each in seen:
            colour = colours.setdefault(each.name, COLOURS[len(colours) % len(COLOURS)])
            begin, end = max(each.begin_ms, left), min(each.end_ms, right)
            axes.broken_barh([(begin, end - begin)], (row + each.depth, 0.9), facecolors=colour, linewidth=0)
            room = int((end - begin) / (right - left) * 130)
            if room > 3:
                text = each.name if len(each.name) <= room else f"{each.name[: room - 1]}…"
                middle = ((begin + end) / 2, row + each.depth + 0.45)
                axes.text(*middle, text, ha="center", va="center", fontsize=7, color="white", clip_on=True)
        depth = 1 + max((each.depth for each in seen), default=0)
        ticks[name] = row + depth / 2
        row += depth + 1
    axes.set_yticks(list(ticks.values()), list(ticks), fontsize=8)
    axes.set_xlim(left, right)
    axes.set_ylim(row - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


if __name__ == "__main__":
    draw(tracks(Path(sys.argv[1])), Path(sys.argv[2]))
