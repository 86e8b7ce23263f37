"""A simulated step under some choice of what is kept, offloaded or recomputed, and its modules one by one."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from nemo_rl_offload.offload.solver import Action
from nemo_rl_offload.planner.job import Job
from nemo_rl_offload.planner.simulate.simulator import Segment, StageTimes, Transfers, simulate
from nemo_rl_offload.planner.simulate.stages import Stage, build_stages, job_link, job_schedule
from nemo_rl_offload.planner.simulate.steady_state import all_actions, earliest_actions, steady_state_actions

Actions = tuple[tuple[Action, ...], ...]
"""By stage, in the order of its records."""


@dataclass(frozen=True)
class SimulatedStep:
    """A simulated step under some choice of actions."""

    stages: tuple[Stage, ...]
    actions: Actions
    times: tuple[StageTimes, ...]
    """Of the simulated part of the step."""
    step_ms: float
    simulated_ms: float
    """Length of the simulated part: as many microbatches as it takes for the pipeline to settle."""

    def peak_bytes(self, rank: int) -> int:
        """Predicted peak of a stage's rank."""
        return sum(self.stages[rank].static_bytes.values()) + self.times[rank].peak_bytes

    def host_bytes(self, rank: int) -> int:
        """Host memory for activations of a stage's rank."""
        return self.times[rank].peak_host_bytes

    def exposed_share(self, rank: int) -> float:
        """Share of the step in which a stage's compute waits for copies."""
        return self.times[rank].exposed_ms / self.simulated_ms


def highest_peak(step: SimulatedStep) -> int:
    """The fullest stage's."""
    return max(step.peak_bytes(rank) for rank in range(len(step.stages)))


def run_stages(job: Job, stages: Sequence[Stage], actions: Sequence[Sequence[Action]]) -> SimulatedStep:
    """Simulate a few rounds of microbatches. A full pipeline repeats itself: the others take as long as one there, and
    no less than the busiest stage computes: after a wait for copies, a stage has microbatches ready and is faster."""
    segments = [stage.segments(chosen) for stage, chosen in zip(stages, actions, strict=True)]
    ranks, simulated = job.layout.pipeline, _num_simulated(job)
    timeline = simulate(job_schedule(job, simulated), segments, Transfers(job_link(job)))
    step_ms = timeline.step_ms
    if simulated < job.num_microbatches:
        ends = timeline.microbatch_ends_ms
        microbatch_ms = (ends[3 * ranks - 1] - ends[2 * ranks - 1]) / ranks
        step_ms += (job.num_microbatches - simulated) * max(microbatch_ms, *map(_compute_ms, segments))
    actions_of_stages = tuple(tuple(chosen) for chosen in actions)
    return SimulatedStep(tuple(stages), actions_of_stages, tuple(timeline.stages), step_ms, timeline.step_ms)


def _compute_ms(chunks: Sequence[Sequence[Segment]]) -> float:
    """Of one microbatch on a stage."""
    return sum(segment.forward_ms + segment.backward_ms for chunk in chunks for segment in chunk)


def _num_simulated(job: Job) -> int:
    return min(job.num_microbatches, 4 * job.layout.pipeline)


def run_whole_modules(job: Job, modules: Collection[str]) -> SimulatedStep:
    """Offload these modules in every layer that has them."""
    stages = build_stages(job, modules)
    return run_stages(job, stages, all_actions(stages))


def run_steady_state(job: Job, modules: Collection[str], fraction: float = 1.0) -> SimulatedStep:
    """The same as the job's engine does it: this project's keeps what has no time to leave and come back, and, while
    the device has room, what compute would wait for. Of what is left, the earliest `fraction` of each forward's
    groups is offloaded."""
    stages = build_stages(job, modules)

    def run(actions: Sequence[Sequence[Action]]) -> SimulatedStep:
        return run_stages(
            job, stages, [earliest_actions(stage, own, fraction) for stage, own in zip(stages, actions, strict=True)]
        )

    if not job.native_engine:
        return run(all_actions(stages))
    schedule, link = job_schedule(job, _num_simulated(job)), job_link(job)
    spread = steady_state_actions(stages, schedule, link, lets_wait=False)
    step = run(spread)
    has_room = [step.peak_bytes(rank) <= job.device.memory_bytes for rank in range(len(stages))]
    if all(has_room):
        return step
    waiting = steady_state_actions(stages, schedule, link, lets_wait=True)
    return run([each if fits else other for each, other, fits in zip(spread, waiting, has_room, strict=True)])


def run_configured(job: Job) -> SimulatedStep:
    """The modules that the configuration lists, as the job's engine does it."""
    return run_steady_state(job, job.offload_modules, job.offload_fraction)


def module_rows(step: SimulatedStep, rank: int) -> list["ModuleRow"]:
    """A stage's modules, in forward order of their first occurrence."""
    stage, times = step.stages[rank], step.times[rank]
    rows: dict[str, ModuleRow] = {}
    taken = iter(step.actions[rank])
    for number, (chunk, owners) in enumerate(zip(stage.chunks, stage.owners(step.actions[rank]), strict=True)):
        waits = (times.waits_in_ms[number], times.waits_out_ms[number])
        for index, part in enumerate(chunk):
            actions = [next(taken) for _ in part.groups or (None,)]
            row = rows.setdefault(part.module, ModuleRow(part.module))
            row.recompute_ms += part.recompute_ms
            if part.is_recomputed:
                row.add(0, 0, Action.RECOMPUTE, (number, index))
            for group, action in zip(part.groups, actions, strict=False):
                row = rows.setdefault(group.module, ModuleRow(group.module))
                row.add(group.num_bytes, stage.live[number], action, (number, index))
            if (segment := owners.get(index)) is not None:
                first = next(g for g, action in zip(part.groups, actions, strict=True) if action is Action.OFFLOAD)
                rows[first.module].exposed_ms += sum(row[segment] for row in waits)
    return [row for row in rows.values() if row.num_bytes]


class ModuleRow:
    """One module on one stage: bytes per microbatch over its layers, and what happens to them."""

    def __init__(self, module: str) -> None:
        self.module = module
        self.num_bytes = 0
        self.live_bytes = 0
        """At the peak, were nothing done."""
        self.offloaded_bytes = 0
        self.places: dict[Action, set[tuple[int, int]]] = {}
        """Chunk and part of each layer to some of whose bytes an action is done."""
        self.recompute_ms = 0.0
        """Of a microbatch: what backward computes again in it, as a part of the job."""
        self.exposed_ms = 0.0
        """Over the simulated part of the step."""

    @property
    def num_layers(self) -> int:
        return len(set().union(*self.places.values()))

    def add(self, num_bytes: int, live: int, action: Action, place: tuple[int, int]) -> None:
        self.num_bytes += num_bytes
        self.live_bytes += num_bytes * live
        self.places.setdefault(action, set()).add(place)
        if action is Action.OFFLOAD:
            self.offloaded_bytes += num_bytes
