"""When to bring offloaded bytes back: pure arithmetic over times.

The link is a serial server, so the start of one reload bounds that of the reload before it: taken from the last one
needed to the first, `L_k = min(D_k, L_{k+1}) - copy_k`, where `D_k` is the moment at which the compute stream needs
group k. Work can be given to the link only at boundaries (a commit, or a backward that arrives at a group): a reload is
issued at the last boundary before its latest start. Starting earlier would hold device memory for nothing; starting
later would let the device wait. Rejected: a fixed number of groups ahead, which is too late for large groups behind
short ones and too early for the others.
"""

from collections.abc import Sequence
from typing import NamedTuple

MARGIN = 1.1
"""A copy is taken for this much slower than usual."""


class Need(NamedTuple):
    """A reload to come: when the compute stream needs it, counted from now, and how long the link takes."""

    due_ms: float
    copy_ms: float


def latest_starts_ms(needs: Sequence[Need]) -> list[float]:
    """The latest start of each reload, for `needs` in the order in which they are needed; no start is before the one
    before it."""
    starts: list[float] = []
    latest = float("inf")
    for due, copy in reversed(needs):
        latest = min(due, latest) - copy
        starts.append(latest)
    return starts[::-1]
