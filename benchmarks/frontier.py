"""Step time at equal peak memory: what the points of several variants say about each other. Pure Python."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

RIVALS = {"recomputation and hooks": ("recompute", "hooks"), "engines": ("megatron", "transformer_engine")}
"""Kinds of variants that one bar of E2 holds for."""


@dataclass(frozen=True)
class Point:
    """A variant's medians."""

    name: str
    kind: str
    peak_bytes: int
    step_ms: float


@dataclass(frozen=True)
class Level:
    """The best of both sides whose peak is at most a rival's."""

    peak_bytes: int
    rival: str
    rival_ms: float
    ours: str | None
    """None: nothing of ours needs so little."""
    ours_ms: float | None

    @property
    def ratio(self) -> float | None:
        """Our time over theirs."""
        return None if self.ours_ms is None else self.ours_ms / self.rival_ms


def points(variants: Sequence[Mapping[str, Any]]) -> list[Point]:
    """Those of the variants that ran to the end."""
    return [
        Point(each["name"], each["kind"], each["medians"]["peak_allocated_bytes"], each["medians"]["ms"])
        for each in variants
        if each["error"] is None and "medians" in each
    ]


def levels(found: Sequence[Point], kinds: Collection[str]) -> list[Level]:
    """One for the peak of each rival that saves memory, from the highest peak down.

    A rival that is slower than another one with less memory stands for that other one.
    """
    plain = [point.peak_bytes for point in found if point.kind == "nothing"]
    rivals = [point for point in found if point.kind in kinds and point.peak_bytes < min(plain, default=1 << 62)]
    result = []
    for peak_bytes in sorted({rival.peak_bytes for rival in rivals}, reverse=True):
        rival = _fastest(rivals, peak_bytes)
        own = _fastest([point for point in found if point.kind == "ours"], peak_bytes)
        assert rival is not None
        ours = (None, None) if own is None else (own.name, own.step_ms)
        result.append(Level(peak_bytes, rival.name, rival.step_ms, *ours))
    return result


def _fastest(found: Sequence[Point], peak_bytes: int) -> Point | None:
    fitting = [point for point in found if point.peak_bytes <= peak_bytes]
    return min(fitting, key=lambda point: point.step_ms, default=None)


def peaks_of_same_modules(found: Sequence[Point]) -> dict[str, float]:
    """Our peak over that of Megatron-Core's engine, for each set of modules that both offloaded."""
    ours, theirs = (
        {point.name.partition(": ")[2]: point.peak_bytes for point in found if point.kind == kind}
        for kind in ("ours", "megatron")
    )
    return {name: ours[name] / theirs[name] for name in ours if theirs.get(name)}


def figures(variants: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What E2's bars are held against. `worst_ratio` is null where some level was not reached, or there was none."""
    found = points(variants)
    result: dict[str, Any] = {"peak_over_megatrons": peaks_of_same_modules(found)}
    for name, kinds in RIVALS.items():
        those = levels(found, kinds)
        ratios = [level.ratio for level in those]
        reached = [ratio for ratio in ratios if ratio is not None]
        result[f"against {name}"] = {
            "levels": [{**vars(level), "ratio": level.ratio} for level in those],
            "num_levels_not_reached": len(ratios) - len(reached),
            "worst_ratio": max(reached) if reached and len(reached) == len(ratios) else None,
        }
    return result
