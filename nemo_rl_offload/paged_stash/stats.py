"""What a rank's experts and stash counted; and that of all ranks as one."""

from collections.abc import Sequence
from typing import TypedDict


class StashSizes(TypedDict, total=False):
    """Of the pages; nothing without a stash."""

    device_bytes: int
    host_bytes: int
    peak_bytes: int
    """The most in use at a time."""


class StashStats(StashSizes):
    """Counts over all steps, the factors that they needed, and the stash's sizes where there is one."""

    steps: int
    reruns: int
    """Steps that ran again, because ..."""
    overflows: int
    """... the stash was full,"""
    over_budget: int
    """... the experts' buffers were full."""
    spilled: int
    """Steps with rows in host pages."""
    needed_capacity_factor: float
    needed_stash_factor: float | None
    """None without a stash."""


def stash_totals(per_rank: Sequence[StashStats]) -> StashStats:
    """Sizes are added up, factors are the highest; all ranks run the same steps again."""
    totals = per_rank[0].copy()
    totals["needed_capacity_factor"] = max(stats["needed_capacity_factor"] for stats in per_rank)
    factors = [factor for stats in per_rank if (factor := stats["needed_stash_factor"]) is not None]
    totals["needed_stash_factor"] = max(factors, default=None)
    if "peak_bytes" in totals:
        totals["device_bytes"] = sum(stats["device_bytes"] for stats in per_rank)
        totals["host_bytes"] = sum(stats["host_bytes"] for stats in per_rank)
        totals["peak_bytes"] = sum(stats["peak_bytes"] for stats in per_rank)
    return totals
