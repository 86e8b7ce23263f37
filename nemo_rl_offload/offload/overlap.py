"""Which groups are not worth sending to the host, and how many at once: pure arithmetic, of what was measured or
simulated."""

from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Sequence
from typing import NamedTuple

MIN_BOUND_BYTES = 1 << 30


def bound_bytes(given: int | None, largest_bytes: int) -> int:
    """How much may be under way one way, where no bound is given and a group has at most `largest_bytes`. With less
    than two groups, which are large where sequences are long, no copy goes on beside the compute behind it: simulated
    layers of 64k tokens took 9 % longer."""
    return max(MIN_BOUND_BYTES, 2 * largest_bytes) if given is None else given


class Visit(NamedTuple):
    """One group in a recorded step: committed, reached by backward, and its copies' durations, all in ms; `forward`
    is the same for the groups of one forward."""

    committed_ms: float
    reached_ms: float
    out_ms: float
    in_ms: float
    forward: Hashable = 0


def fit_overlap(visits: Sequence[Visit], boundaries_ms: Sequence[float]) -> list[bool]:
    """Whether each visit, in order of commit, can leave the device and be back in time.

    It has to be copied out behind the ones before it, be let go at one boundary, and start its way back at a later
    boundary that is early enough, also for those of its forward that are wanted after it and come back behind it.
    Groups at the end of a forward often cannot: their backward follows at once. `boundaries_ms` are sorted.
    """
    worth = []
    copied_ms = 0.0
    latest_ms: dict[Hashable, float] = {}  # by forward: when the link must turn to what it brought back so far
    for committed, reached, out, back, forward in visits:
        done = max(copied_ms, committed) + out
        start = min(reached, latest_ms.get(forward, reached)) - back
        num_inside = bisect_right(boundaries_ms, start) - bisect_left(boundaries_ms, done)
        worth.append(num_inside >= 2)
        if worth[-1]:
            copied_ms, latest_ms[forward] = done, start
    return worth
