"""What the engine does with a list of modules: it leaves on the device what has no time to leave and come back, and
what compute would wait for too long, while there is room for that.

The engine learns that from a step's times, of which it takes out what compute waited for copies. So what it moves does
not change what it learns, and one simulation, in which copies take no time, tells what it settles on. Limit: in a
pipeline, a stage also waits for others that wait for copies, which is not taken out of its times and is neglected here.
"""

from collections.abc import Collection, Hashable, Sequence
from math import inf

from nemo_rl_offload.offload.overlap import Visit, bound_bytes, fit_overlap
from nemo_rl_offload.offload.solver import Action, Link
from nemo_rl_offload.planner.simulate.pipeline_schedule import Schedule
from nemo_rl_offload.planner.simulate.simulator import Segment, StageTimes, Transfers, simulate
from nemo_rl_offload.planner.simulate.stages import Stage

_AT_ONCE = Transfers(Link(float("inf"), float("inf")))


def all_actions(stages: Sequence[Stage]) -> list[list[Action]]:
    """Offload whatever can be, by stage."""
    return [[Action.OFFLOAD if record.can_offload else Action.KEEP for record in stage.records()] for stage in stages]


def steady_state_actions(
    stages: Sequence[Stage], schedule: Schedule, link: Link, *, lets_wait: bool
) -> list[list[Action]]:
    """The same, but for groups that in no microbatch of this schedule have the time to leave and come back, and, unless
    it `lets_wait`, for those behind which compute would wait too long."""
    actions = all_actions(stages)
    segments = [stage.segments(each) for stage, each in zip(stages, actions, strict=True)]
    times = simulate(schedule, segments, _AT_ONCE, with_memory=False).stages
    return [
        _without(stage, each, _moving(stage_times, own, link, lets_wait))
        for stage, each, stage_times, own in zip(stages, actions, times, segments, strict=True)
    ]


def earliest_actions(stage: Stage, actions: Sequence[Action], fraction: float) -> list[Action]:
    """Of each forward's offloaded groups that share, the earliest (`activation_offload_fraction`); the rest is kept."""
    found, remaining = [], iter(actions)
    for parts in stage.chunks:
        own = [next(remaining) for part in parts for _ in part.groups or (None,)]
        moving = [index for index, action in enumerate(own) if action is Action.OFFLOAD]
        left_out = set(moving[len(moving) - int(len(moving) * (1 - fraction)) :])
        found += [Action.KEEP if index in left_out else action for index, action in enumerate(own)]
    return found


def _moving(times: StageTimes, segments: Sequence[Sequence[Segment]], link: Link, lets_wait: bool) -> set[Hashable]:
    """The segments, by chunk and number, that are worth moving in some microbatch."""
    visits = []
    for (chunk, number, microbatch), committed_ms in times.committed_ms.items():
        num_bytes = segments[chunk][number].offloaded_bytes
        visits.append(
            Visit(
                committed_ms,
                times.reached_ms[chunk, number, microbatch],
                num_bytes / link.out_bytes_per_ms,
                num_bytes / link.in_bytes_per_ms,
                (chunk, microbatch),
                (chunk, number),
            )
        )
    boundaries_ms = sorted([*times.committed_ms.values(), *times.reached_ms.values()])
    largest = max(segment.offloaded_bytes for chunk in segments for segment in chunk)
    bound_ms = inf if lets_wait else bound_bytes(None, largest) / link.out_bytes_per_ms
    return fit_overlap(visits, boundaries_ms, bound_ms)


def _without(stage: Stage, actions: Sequence[Action], moving: Collection[Hashable]) -> list[Action]:
    """Keep what is in none of these segments."""
    found, remaining = [], iter(actions)
    for chunk, (parts, owners) in enumerate(zip(stage.chunks, stage.owners(actions), strict=True)):
        for index, part in enumerate(parts):
            moves = (chunk, owners.get(index)) in moving
            for _ in part.groups or (None,):
                action = next(remaining)
                found.append(action if moves or action is not Action.OFFLOAD else Action.KEEP)
    return found
