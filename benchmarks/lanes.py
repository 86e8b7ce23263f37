"""What a trace of torch's profiler says of one step: when compute, copies either way, and the host were busy.

Pure Python over the trace's own events (Chrome's format, which Perfetto opens too). Times in a trace are microseconds.
"""

import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

LANES = ("compute", "copy out", "copy in", "host")
GAP_MS = 0.005
"""Intervals that are no further apart are one: less than a picture shows."""

Interval = tuple[float, float]
"""Start and end, ms."""


def lane_of(event: Mapping[str, Any]) -> str | None:
    """The lane of a trace's event; None for what takes no time of its own, such as a user's annotation, and for the
    waits of `pipeline_waits`."""
    category, name = event.get("cat"), str(event.get("name"))
    if event.get("ph") != "X" or "_wait_until" in name:
        return None
    if category == "gpu_memcpy":
        return "copy out" if "DtoH" in name else "copy in" if "HtoD" in name else "compute"
    if category in ("kernel", "gpu_memset"):
        return "compute"
    return "host" if category in ("cpu_op", "cuda_runtime", "cuda_driver") else None


def lanes(events: Iterable[Mapping[str, Any]]) -> dict[str, list[Interval]]:
    """Busy intervals of each lane, in ms since the first of all, joined where they touch."""
    found: dict[str, list[Interval]] = {lane: [] for lane in LANES}
    for event in events:
        if lane := lane_of(event):
            start = float(event["ts"]) / 1e3
            found[lane].append((start, start + float(event["dur"]) / 1e3))
    begin = min((start for intervals in found.values() for start, _ in intervals), default=0.0)
    return {lane: [(start - begin, end - begin) for start, end in joined(each)] for lane, each in found.items()}


def joined(intervals: Iterable[Interval]) -> list[Interval]:
    """In order, with those joined that overlap or touch."""
    result: list[Interval] = []
    for start, end in sorted(intervals):
        if result and start <= result[-1][1] + GAP_MS:
            result[-1] = result[-1][0], max(result[-1][1], end)
        else:
            result.append((start, end))
    return result


def busy_ms(intervals: Sequence[Interval]) -> float:
    """How long a lane was busy."""
    return sum(end - start for start, end in intervals)


def overlap_ms(left: Sequence[Interval], right: Sequence[Interval]) -> float:
    """How long both lanes were busy at once; each in order and without overlaps of its own."""
    total, first, second = 0.0, 0, 0
    while first < len(left) and second < len(right):
        total += max(0.0, min(left[first][1], right[second][1]) - max(left[first][0], right[second][0]))
        if left[first][1] < right[second][1]:
            first += 1
        else:
            second += 1
    return total


def read_trace(path: Path, name: str) -> dict[str, Any]:
    """What a result keeps of a trace (.json.gz) of one step: figures, and when each lane was busy."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        found = lanes(json.load(file)["traceEvents"])
    intervals = {lane: [[round(at, 3) for at in each] for each in found[lane]] for lane in LANES}
    return {"name": name, "figures": figures(found), "lanes": intervals}


def figures(found: Mapping[str, Sequence[Interval]]) -> dict[str, float]:
    """How busy each lane was, and how much of the copies compute went on beside."""
    result = {f"{lane.replace(' ', '_')}_ms": busy_ms(found[lane]) for lane in LANES}
    result["span_ms"] = max((end for intervals in found.values() for _, end in intervals), default=0.0)
    for lane in ("copy out", "copy in"):
        result[f"{lane.replace(' ', '_')}_beside_compute_ms"] = overlap_ms(found[lane], found["compute"])
    return result
