"""The plan of a job: what to offload on each stage for a memory budget, what it costs, and what else would fit.

The chooser decides stage by stage from predicted records; the simulator then runs the whole pipeline. Where its peak,
which also counts copies on their way, is above the budget, the chooser gets that much less and decides again.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from nemo_rl_offload.planner.changes import fitting_changes, on_their_way, stage_budget
from nemo_rl_offload.planner.choose import Action, Plan, choose
from nemo_rl_offload.planner.job import Job
from nemo_rl_offload.planner.listed import all_actions, listed_actions
from nemo_rl_offload.planner.modules import NATIVE_MODULES
from nemo_rl_offload.planner.simulator import StageTimes, Transfers, simulate
from nemo_rl_offload.planner.stages import (
    MEGATRONS_SEPARABLE,
    SEPARABLE,
    Stage,
    build_stages,
    candidates,
    job_link,
    job_schedule,
)

Actions = tuple[tuple[Action, ...], ...]
"""By stage, in the order of its records."""

_ROUNDS = 6
_MARGIN_BYTES = 64 << 20
_FRONTIER_POINTS = 6


@dataclass(frozen=True)
class Outcome:
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


def highest_peak(outcome: Outcome) -> int:
    """The fullest stage's."""
    return max(outcome.peak_bytes(rank) for rank in range(len(outcome.stages)))


@dataclass(frozen=True)
class FrontierPoint:
    """Device memory against step time on the fullest stage."""

    peak_bytes: int
    step_ms: float


@dataclass(frozen=True)
class JobPlan:
    """Everything that `nemo-rl-offload plan` shows."""

    job: Job
    baseline: Outcome
    """Nothing offloaded."""
    configured: Outcome | None
    """What the engine does with the modules that `offload_modules` lists."""
    chosen: Outcome
    """Chosen for the budget, per module and layer."""
    written: Outcome
    """The choice as configuration keys can say it, whole modules, and what the engine does with those."""
    modules_to_write: tuple[str, ...]
    """`offload_modules` of that."""
    recompute_to_write: tuple[str, ...]
    """`recompute_modules` of that, the configured ones included."""
    shortfalls: tuple[int, ...]
    """By stage, how far the chosen plan's peak is above the budget."""
    frontier: tuple[FrontierPoint, ...]
    changes: tuple[str, ...]
    """Where the budget is not met: changes that would do, nearest first."""

    @property
    def shortfall_bytes(self) -> int:
        return max(self.shortfalls)


def make_plan(job: Job) -> JobPlan:
    """Plan a job: simulate it as it is, choose for its budget, and look for changes where that is not enough."""
    stages = build_stages(job, candidates(job))
    baseline = run_stages(job, stages, [[Action.KEEP] * len(stage.records()) for stage in stages])
    configured = run_listed_modules(job, job.offload_modules) if job.offload_modules else None
    chosen = baseline
    if highest_peak(baseline) > job.budget_bytes:
        chosen = _choose_all(job, build_stages(job, candidates(job), _recomputation(job, baseline)), baseline)
    shortfalls = tuple(max(0, chosen.peak_bytes(rank) - job.budget_bytes) for rank in range(len(stages)))
    written = _whole_choice(job, chosen)
    changes = fitting_changes(job) if any(shortfalls) else ()
    frontier = _frontier(job, chosen.stages, baseline)
    return JobPlan(job, baseline, configured, chosen, *written, shortfalls, frontier, changes)


def run_stages(job: Job, stages: Sequence[Stage], actions: Sequence[Sequence[Action]]) -> Outcome:
    """Simulate a few rounds of microbatches. A full pipeline repeats itself: the others take as long as one there."""
    segments = [stage.segments(chosen) for stage, chosen in zip(stages, actions, strict=True)]
    ranks, simulated = job.layout.pipeline, _num_simulated(job)
    timeline = simulate(job_schedule(job, simulated), segments, Transfers(job_link(job)))
    step_ms = timeline.step_ms
    if simulated < job.num_microbatches:
        ends = timeline.microbatch_ends_ms
        step_ms += (job.num_microbatches - simulated) * (ends[3 * ranks - 1] - ends[2 * ranks - 1]) / ranks
    actions_of_stages = tuple(tuple(chosen) for chosen in actions)
    return Outcome(tuple(stages), actions_of_stages, tuple(timeline.stages), step_ms, timeline.step_ms)


def _num_simulated(job: Job) -> int:
    return min(job.num_microbatches, 4 * job.layout.pipeline)


def run_whole_modules(job: Job, modules: Collection[str]) -> Outcome:
    """Offload these modules in every layer that has them."""
    stages = build_stages(job, modules)
    return run_stages(job, stages, all_actions(stages))


def run_listed_modules(job: Job, modules: Collection[str]) -> Outcome:
    """The same as the job's engine does it: this project's keeps what has no time to leave and come back."""
    if not job.native_engine:
        return run_whole_modules(job, modules)
    stages = build_stages(job, modules)
    return run_stages(job, stages, listed_actions(stages, job_schedule(job, _num_simulated(job)), job_link(job)))


def _recomputation(job: Job, baseline: Outcome) -> tuple[str, ...]:
    """The entries of `recompute_modules` that the chooser may use: each pins something, so only those that help.

    Tried one after another on the fullest stage.
    """
    rank, link = max(range(len(baseline.stages)), key=baseline.peak_bytes), job_link(job)

    def score(names: tuple[str, ...]) -> tuple[int, float]:
        stage = build_stages(job, candidates(job), names)[rank]
        plan = choose(stage.records(), stage_budget(job, stage, on_their_way(stage)), link)
        return plan.shortfall_bytes, plan.step_ms

    taken: tuple[str, ...] = ()
    best = score(taken)
    for name in SEPARABLE if job.native_engine else MEGATRONS_SEPARABLE:
        if (found := score((*taken, name))) < best:
            taken, best = (*taken, name), found
    return taken


def _choose_all(job: Job, stages: Sequence[Stage], baseline: Outcome) -> Outcome:
    outcome, link = baseline, job_link(job)
    actions = [[Action.KEEP] * len(stage.records()) for stage in stages]
    less = [on_their_way(stage) for stage in stages]
    exhausted: set[int] = set()
    for attempt in range(_ROUNDS):
        over = {rank for rank in range(len(stages)) if outcome.peak_bytes(rank) > job.budget_bytes} - exhausted
        if not over:
            break
        for rank in over:
            if attempt:
                less[rank] += outcome.peak_bytes(rank) - job.budget_bytes + _MARGIN_BYTES
            plan = choose(stages[rank].records(), stage_budget(job, stages[rank], less[rank]), link)
            actions[rank] = list(plan.actions)
            if plan.shortfall_bytes:
                exhausted.add(rank)
        outcome = run_stages(job, stages, actions)
    return outcome


def _whole_choice(job: Job, chosen: Outcome) -> tuple[Outcome, tuple[str, ...], tuple[str, ...]]:
    """Turn a choice into whole modules: all that it touches somewhere, less those that the budget does not need.

    Recomputation is dropped first, then modules, those with the most bytes to copy first.
    """
    sizes: Counter[str] = Counter()
    recompute = set(job.recompute.modules)
    for stage, actions in zip(chosen.stages, chosen.actions, strict=True):
        for record, group, action in zip(stage.records(), stage.groups(), actions, strict=True):
            if action is Action.OFFLOAD:
                sizes[record.module] += record.saved_bytes
            elif action is Action.RECOMPUTE:
                assert group is not None
                assert group.recomputed_by is not None
                recompute.add(group.recomputed_by)
    everything = frozenset(sizes), frozenset(recompute)
    modules, names = everything
    for name in sorted(names - job.recompute.modules):
        if _fits(job, modules, names - {name}):
            names -= {name}
    for module, _ in sizes.most_common():
        if _fits(job, modules - {module}, names):
            modules -= {module}
    outcome = _run_whole(job, modules, names)
    if highest_peak(outcome) > job.budget_bytes:
        modules, names = everything
        outcome = _run_whole(job, modules, names)
    return outcome, _with_attention(modules), tuple(sorted(names))


def _run_whole(job: Job, modules: Collection[str], recompute: Collection[str]) -> Outcome:
    changed = replace(job, recompute=replace(job.recompute, modules=frozenset(recompute)))
    return run_listed_modules(changed, _with_attention(modules))


def _fits(job: Job, modules: Collection[str], recompute: Collection[str]) -> bool:
    changed = replace(job, recompute=replace(job.recompute, modules=frozenset(recompute)))
    for stage in build_stages(changed, _with_attention(modules)):
        budget = stage_budget(changed, stage, on_their_way(stage))
        stays = sum(record.saved_bytes * record.live_at_peak for record in stage.records() if not record.can_offload)
        if budget.fixed_bytes + stays > budget.peak_bytes:
            return False
    return True


def _with_attention(modules: Collection[str]) -> tuple[str, ...]:
    """Modules in their usual order; Megatron-Core lets attn_proj be offloaded only beside core_attn."""
    named = {*modules, "core_attn"} if "attn_proj" in modules else modules
    return tuple(module for module in NATIVE_MODULES if module in named)


def _frontier(job: Job, stages: Sequence[Stage], baseline: Outcome) -> tuple[FrontierPoint, ...]:
    """Budgets from the fullest stage's least to its most, and the time that choices for them add to each microbatch."""
    rank = max(range(len(stages)), key=baseline.peak_bytes)
    stage, link = stages[rank], job_link(job)
    records = stage.records()
    most = baseline.peak_bytes(rank)
    least = choose(records, replace(stage_budget(job, stage), peak_bytes=0), link).peak_bytes
    points = []
    alone_ms = sum(record.forward_ms + record.backward_ms for record in records)
    for number in range(_FRONTIER_POINTS):
        peak = least + (most - least) * number // (_FRONTIER_POINTS - 1)
        plan: Plan = choose(records, replace(stage_budget(job, stage), peak_bytes=peak), link)
        extra_ms = (plan.step_ms - alone_ms) * job.num_microbatches
        points.append(FrontierPoint(plan.peak_bytes, baseline.step_ms + extra_ms))
    return tuple(points)


def module_rows(outcome: Outcome, rank: int) -> list["ModuleRow"]:
    """A stage's modules, in forward order of their first occurrence."""
    stage, times = outcome.stages[rank], outcome.times[rank]
    rows: dict[str, ModuleRow] = {}
    taken = iter(outcome.actions[rank])
    for number, (chunk, owners) in enumerate(zip(stage.chunks, stage.owners(outcome.actions[rank]), strict=True)):
        for index, part in enumerate(chunk):
            segment = owners.get(index)
            waits = (times.waits_in_ms[number], times.waits_out_ms[number])
            exposed_ms = 0.0 if segment is None else sum(row[segment] for row in waits)
            for group in part.groups:
                row = rows.setdefault(group.module, ModuleRow(group.module))
                row.add(group.num_bytes, stage.live[number], next(taken), exposed_ms)
            if not part.groups:
                next(taken)
    return [row for row in rows.values() if row.num_bytes]


class ModuleRow:
    """One module on one stage: bytes per microbatch over its layers, and what happens to them."""

    def __init__(self, module: str) -> None:
        self.module = module
        self.num_bytes = 0
        self.live_bytes = 0
        """At the peak, were nothing done."""
        self.offloaded_bytes = 0
        self.num_layers = 0
        self.actions: Counter[Action] = Counter()
        self.exposed_ms = 0.0
        """Over the simulated part of the step."""

    def add(self, num_bytes: int, live: int, action: Action, exposed_ms: float) -> None:
        self.num_bytes += num_bytes
        self.live_bytes += num_bytes * live
        self.num_layers += 1
        self.actions[action] += 1
        if action is Action.OFFLOAD:
            self.offloaded_bytes += num_bytes
            self.exposed_ms += exposed_ms
