"""Chooses for a job's budget: how much is recomputed, and what is kept, offloaded or recomputed of the rest.

Mechanism. Some recomputation belongs to one group each (`SEPARABLE`), and `choose` takes it group by group. What takes
several groups at once is tried as a whole: *ways*, which recompute MLPs up to their last linear in ever more layers,
then whole MLPs or experts where the engine has no parts of them, then whole layers. Each way gets a score from `choose`
on the fullest stage, and the whole pipeline is simulated for the best of them. Where the simulated peak, which also
counts copies on their way, is above the budget, the chooser gets that much less and decides again. `choose` takes
copies to end before backward begins; where listed modules fit and no compute waits for them, that is simulated too, for
the first way in which it is so. The fastest that fits is taken.

Rejected: recomputed MLPs as actions of `choose`. They free several groups and take room in backward that belongs to no
group, and configurations can only say for how many layers they are, not for which.

Limit: one number of layers for all stages.
"""

import functools
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from nemo_rl_offload.planner.changes import on_their_way, stage_budget
from nemo_rl_offload.planner.choose import Action, Plan, choose
from nemo_rl_offload.planner.job import Job, Recompute
from nemo_rl_offload.planner.layout import stage_layers
from nemo_rl_offload.planner.outcome import Outcome, highest_peak, run_listed_modules, run_stages
from nemo_rl_offload.planner.stages import (
    Stage,
    build_stages,
    candidates,
    job_link,
    separable,
)
from nemo_rl_offload.planner.written import in_order, may_fit

_ROUNDS = 6
_MARGIN_BYTES = 64 << 20
_NUM_COUNTS = 6
"""Into so many numbers of layers MLPs are divided."""
_NUM_SIMULATED = 3
_FREE_SHARE = 1e-3
"""Of the step: waits below it are none."""


def fullest_stage(baseline: Outcome) -> int:
    """The rank of the stage with the highest peak."""
    return max(range(len(baseline.stages)), key=baseline.peak_bytes)


def ways(job: Job) -> Iterator[Job]:
    """The job with its configured recomputation, then with ever more."""
    yield job
    if job.recompute.method is not None:
        return
    yield from (replace(job, recompute=each) for each in _more_modules(job))
    if not job.expert_buffers.has_stash:
        yield replace(job, recompute=Recompute(method="uniform"))


def _more_modules(job: Job) -> Iterator[Recompute]:
    given, shape = job.recompute, job.shape
    has_experts, has_dense = (kind in shape.layers_with_experts for kind in (True, False))
    if has_dense and "mlp" not in given.modules:
        if job.recomputes_mlp_parts:
            yield from _counted(job)
        else:
            yield replace(given, modules=given.modules | {"mlp"})
    if has_experts and "moe" not in given.modules and not job.expert_buffers.has_stash:
        yield replace(given, modules=given.modules - {"moe_act"} | {"moe"})


def _counted(job: Job) -> Iterator[Recompute]:
    """MLPs up to their last linear, in more layers than are configured; the activation alone in the others."""
    given = job.recompute
    chunks = [chunk for stage in stage_layers(job.layout, job.shape.num_layers) for chunk in stage]
    most = max(sum(not job.shape.layers_with_experts[layer] for layer in chunk) for chunk in chunks)
    present = (given.num_counted_layers or most) if "mlp_fc1" in given.modules else 0
    for count in sorted({math.ceil(most * part / _NUM_COUNTS) for part in range(1, _NUM_COUNTS + 1)}):
        if count == most and present < most:
            yield replace(given, modules=given.modules - {"mlp_act"} | {"mlp_fc1"}, num_counted_layers=None)
        elif count > present:
            yield replace(given, modules=given.modules | {"mlp_act", "mlp_fc1"}, num_counted_layers=count)


def choose_for_budget(job: Job, baseline: Outcome) -> tuple[Job, Outcome]:
    """The fastest choice that fits, and the job with its recomputation; else the choice that comes nearest.

    `baseline` is the job's outcome with nothing offloaded.
    """
    rank = fullest_stage(baseline)
    found: list[tuple[int, float, Job, Outcome]] = []

    def add(way: Job, outcome: Outcome) -> None:
        found.append((max(0, highest_peak(outcome) - job.budget_bytes), outcome.step_ms, way, outcome))

    every = list(ways(job))
    listed = functools.cache(lambda number: _listed(every[number]))
    # The more is recomputed, the less has to move, and the longer it takes.
    first = bisect_left(range(len(every)), True, key=lambda number: listed(number) is not None)
    if first < len(every) and (outcome := listed(first)) is not None:
        add(every[first], outcome)
    scored = sorted(((score(way, rank), way) for way in every), key=lambda each: each[0][0])
    for number, ((_, names), way) in enumerate(scored):
        if number >= _NUM_SIMULATED and any(shortfall == 0 for shortfall, *_ in found):
            break
        add(way, _choose_all(way, build_stages(way, candidates(way), names)))
    *_, way, outcome = min(found, key=lambda each: each[:2])
    return way, outcome


def _listed(job: Job) -> Outcome | None:
    """What the engine does with all layers of some modules, those with the least bytes first: None where such a choice
    does not fit, or makes compute wait."""
    sizes: Counter[str] = Counter()
    for stage in build_stages(job, candidates(job)):
        for record in stage.records():
            if record.can_offload:
                sizes[record.module] += record.saved_bytes * record.live_at_peak
    ordered = [module for module, _ in reversed(sizes.most_common())]
    for number in range(len(ordered) + 1):
        modules = in_order(ordered[:number])
        if not may_fit(job, modules):
            continue
        outcome = run_listed_modules(job, modules)
        if highest_peak(outcome) <= job.budget_bytes:
            ranks = range(len(outcome.stages))
            is_free = max(map(outcome.exposed_share, ranks)) < _FREE_SHARE
            return outcome if is_free and max(map(outcome.host_bytes, ranks)) <= job.host_budget_bytes else None
    return None


type Score = tuple[int, float]
"""How far the choice stays above the budget, in bytes, and what a microbatch takes with it, in ms."""


def score(job: Job, rank: int) -> tuple[Score, tuple[str, ...]]:
    """How well a stage meets the budget, and the entries of `recompute_modules` that the chooser may use for it: each
    pins something, so only those that help, tried one after another."""
    names = separable(job)
    stage = build_stages(job, candidates(job), names)[rank]
    there = {group.recomputed_by for group in stage.groups() if group is not None}
    taken: tuple[str, ...] = ()
    best = _score(job, rank, taken)
    for name in names:
        if name in there and (found := _score(job, rank, (*taken, name))) < best:
            taken, best = (*taken, name), found
    return best, taken


def _score(job: Job, rank: int, names: Sequence[str]) -> Score:
    stage = build_stages(job, candidates(job), names)[rank]
    plan = choose(stage.records(), stage_budget(job, stage, on_their_way(stage)), job_link(job))
    return plan.shortfall_bytes, plan.step_ms


def _choose_all(job: Job, stages: Sequence[Stage]) -> Outcome:
    link = job_link(job)
    actions = [[Action.KEEP] * len(stage.records()) for stage in stages]
    outcome = run_stages(job, stages, actions)
    less = [on_their_way(stage) for stage in stages]
    exhausted: set[int] = set()
    for attempt in range(_ROUNDS):
        over = {rank for rank in range(len(stages)) if outcome.peak_bytes(rank) > job.budget_bytes} - exhausted
        if not over:
            break
        for rank in over:
            if attempt:
                less[rank] += outcome.peak_bytes(rank) - job.budget_bytes + _MARGIN_BYTES
            plan: Plan = choose(stages[rank].records(), stage_budget(job, stages[rank], less[rank]), link)
            actions[rank] = list(plan.actions)
            if plan.shortfall_bytes:
                exhausted.add(rank)
        outcome = run_stages(job, stages, actions)
    return outcome
