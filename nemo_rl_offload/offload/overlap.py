"""Which groups have the time to leave the device and come back, and how many may be under way at once.

Pure arithmetic, of what the engine measured or the planner simulated.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Sequence
from typing import NamedTuple

MIN_BOUND_BYTES = 1 << 30


def bound_bytes(given: int | None, largest_bytes: int) -> int:
    """How many bytes may be under way in one direction: `given`, or else 1 GiB, or two of the largest groups.

    With room for less than two groups no copy could go on beside the compute behind it: simulated layers of 64k tokens,
    whose groups are large, took 9 % longer.
    """
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

    Its copy out starts when those before it are out. Its copy back must end before backward comes, and before the link
    has to turn to the groups that its own forward committed earlier, which are wanted later. Between the end of the
    first and the start of the second there must be two boundaries: one at which the memory is let go, and one at which
    the way back begins. Groups at the end of a forward often have not that much time: their backward follows at once.
    `boundaries_ms` are sorted.
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
