"""Which groups have the time to leave the device and come back, and how many may be under way at once.

Pure arithmetic, of what the engine measured or the planner simulated.
"""

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Collection, Hashable, Sequence
from math import inf
from typing import NamedTuple

MIN_BOUND_BYTES = 1 << 30
FRAGMENTATION = 0.03
"""Share of the device that the caching allocator cannot use."""
MOST_WAITED = 0.005
"""Of a step's compute, that it may wait for copies out."""


def bound_bytes(given: int | None, largest_bytes: int) -> int:
    """How many bytes may be under way in one direction: `given`, or else 1 GiB, or two of the largest groups.

    With room for less than two groups no copy could go on beside the compute behind it: simulated layers of 64k tokens,
    whose groups are large, took 9 % longer.
    """
    return max(MIN_BOUND_BYTES, 2 * largest_bytes) if given is None else given


class Visit(NamedTuple):
    """One group in a recorded step: committed, reached by backward, and its copies' durations, all in ms of compute
    without waits; `forward` is the same for the groups of one forward, `key` for those that move or stay together."""

    committed_ms: float
    reached_ms: float
    out_ms: float
    in_ms: float
    forward: Hashable = 0
    key: Hashable = None


def fit_overlap(visits: Sequence[Visit], boundaries_ms: Sequence[float], bound_ms: float = inf) -> set[Hashable]:
    """The keys that move: each has a visit, in order of commit, that can leave the device and be back in time, and for
    none does compute wait too long.

    Its copy out starts when those before it are out. Its copy back must end before backward comes, and before the link
    has to turn to the groups that its own forward committed earlier, which are wanted later. Between the end of the
    first and the start of the second there must be two boundaries: one at which the memory is let go, and one at which
    the way back begins. Groups at the end of a forward often have not that much time: their backward follows at once.
    `boundaries_ms` are sorted.

    Copies out for more than `bound_ms` of the link are never under way: compute waits for the oldest. Where a forward
    makes bytes faster than the link takes them, its first groups alone would fill the link for all of it, with compute
    waiting behind each. So a key stays, if compute would wait for one of its visits when that forward's share of
    `MOST_WAITED` is spent: what moves is then spread over the layers. All forwards have a say. In some the device
    waits for the host, as in the first of a step: by that one's times alone, more would move, and the next one would
    wait for it.
    """
    span_ms = boundaries_ms[-1] - boundaries_ms[0] if boundaries_ms else 0.0
    most_waited_ms = MOST_WAITED * span_ms / max(1, len({visit.forward for visit in visits}))
    moving, staying = _moving(visits, boundaries_ms, bound_ms, most_waited_ms, (), ())
    if bound_ms == inf:
        return moving
    checked, _ = _moving(visits, boundaries_ms, bound_ms, most_waited_ms, moving, staying)
    return moving & checked


def _moving(
    visits: Sequence[Visit],
    boundaries_ms: Sequence[float],
    bound_ms: float,
    most_waited_ms: float,
    expected: Collection[Hashable],
    staying: Collection[Hashable],
) -> tuple[set[Hashable], set[Hashable]]:
    """Of the keys that are not `staying` those that have the time to move, and those for which a forward would wait for
    longer than `most_waited_ms` in all. What is `expected` to move is copied out in forwards without that time, too."""
    moving: set[Hashable] = set()
    more: set[Hashable] = set()
    under_way: deque[tuple[float, float]] = deque()  # ends and durations
    copied_ms = 0.0
    latest_ms: dict[Hashable, float] = {}  # by forward: when the link must turn to what it brought back so far
    left_ms: dict[Hashable, float] = {}  # by forward: for how long it may still wait
    for committed, reached, out, back, forward, key in visits:
        if key in staying or key in more:
            continue
        done = max(copied_ms, committed) + out
        start = min(reached, latest_ms.get(forward, reached)) - back
        num_inside = bisect_right(boundaries_ms, start) - bisect_left(boundaries_ms, done)
        has_time = num_inside >= 2
        if not has_time and key not in expected:
            continue
        wait = _wait_ms(under_way, committed, out, bound_ms)
        left = left_ms.get(forward, most_waited_ms) - wait
        if wait > 0 > left:
            more.add(key)
            continue
        if has_time:
            moving.add(key)
            latest_ms[forward] = start
        under_way.append((done, out))
        copied_ms, left_ms[forward] = done, left
    return moving - more, more


def _wait_ms(under_way: deque[tuple[float, float]], now: float, out: float, bound_ms: float) -> float:
    """How long compute would wait for another copy; forgets those that have ended."""
    while under_way and under_way[0][0] <= now:
        under_way.popleft()
    until, total_ms = now, out + sum(duration for _, duration in under_way)
    for end, duration in under_way:
        if total_ms <= bound_ms:
            break
        until, total_ms = end, total_ms - duration
    return until - now
