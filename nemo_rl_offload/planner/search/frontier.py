"""Memory against step time: of all that was tried, what nothing else beats in both.

Each point was simulated as the engine does it, for keys that can be configured. Rejected: points between them from the
solver's estimates. These neglect copies on their way, so that they beat what was simulated, and no keys give them.
"""

from collections.abc import Iterable, Sequence

from nemo_rl_offload.planner.job import Job
from nemo_rl_offload.planner.search.to_config import ChoiceAsConfig, Trials

_NUM_POINTS = 6


def frontier(job: Job, choice: ChoiceAsConfig, written: ChoiceAsConfig, trials: Trials) -> tuple[ChoiceAsConfig, ...]:
    """The least memory first: at most so many points, among them the choice, and that of the best whole modules or what
    beats it. The choice may take as long as a point with less memory: nothing is offloaded where all of it fits.

    What `auto` would do is none of them unless it is the choice, and neither is what the host has no room for. Nothing
    is recomputed in vain, and no module listed of which nothing moves.
    """
    checked: set[int] = set()
    while True:
        tried = [*trials.whole, *([choice] if choice.is_auto else [])]
        shown = _spread(_with(choice, _falling(each for each in tried if not each.host_excess(job))), (choice, written))
        unchecked = [each for each in shown if id(each) not in checked]
        if not unchecked:
            return shown
        for each in unchecked:
            checked.add(id(each))
            list(trials.try_less(each))


def _falling(choices: Iterable[ChoiceAsConfig]) -> list[ChoiceAsConfig]:
    """Without those that need more memory than another and no less time; of equals, the one with the shortest keys."""

    def order(each: ChoiceAsConfig) -> tuple[int, float, int]:
        return each.peak_bytes, each.step_ms, len(each.offload_modules) + len(each.recompute.modules)

    kept: list[ChoiceAsConfig] = []
    for each in sorted(choices, key=order):
        if not kept or each.step_ms < kept[-1].step_ms:
            kept.append(each)
    return kept


def _with(choice: ChoiceAsConfig, points: Sequence[ChoiceAsConfig]) -> Sequence[ChoiceAsConfig]:
    """With the choice in its place, or its equal."""
    if any((each.peak_bytes, each.step_ms) == (choice.peak_bytes, choice.step_ms) for each in points):
        return points
    return sorted([*points, choice], key=lambda each: each.peak_bytes)


def _spread(points: Sequence[ChoiceAsConfig], wanted: Iterable[ChoiceAsConfig]) -> tuple[ChoiceAsConfig, ...]:
    """As many as are shown, far from each other in memory: the first, the last, and what is as good as `wanted`."""
    taken = {0, len(points) - 1}
    for each in wanted:
        as_good = [
            number
            for number, point in enumerate(points)
            if point.peak_bytes <= each.peak_bytes and point.step_ms <= each.step_ms
        ]
        taken.update(as_good[-1:])
    while len(taken) < min(_NUM_POINTS, len(points)):
        peaks = [points[number].peak_bytes for number in taken]
        rest = [number for number in range(len(points)) if number not in taken]
        taken.add(max(rest, key=lambda number: min(abs(points[number].peak_bytes - peak) for peak in peaks)))
    return tuple(points[number] for number in sorted(taken))
