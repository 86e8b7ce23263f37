"""Chooses for a job's budget: how much is recomputed, and what is kept, offloaded or recomputed of the rest.

Two kinds of recomputation. Some entries of `recompute_modules` belong to one group each (`SEPARABLE`): `solve` takes
them group by group. Others take several groups at once, or stand in all layers. These are tried as *ways*, each a job
of its own: more activations and norms, MLPs up to their last linear in ever more layers (whole MLPs where the engine
has no parts of them), experts, whole layers.

Steps:
1. Each way gets a score from `solve` on the fullest stage.
2. The whole pipeline is simulated for the ways with the best scores.
3. The simulated peak also counts copies on their way. Where it is above the budget, `solve` gets that much less and
   decides again.
4. `solve` takes copies to end before backward begins. So listed modules are simulated too, for the first way in which
   they fit and no compute waits for them.
5. The fastest that fits is taken.

Rejected: recomputed MLPs as actions of `solve`. They free several groups and take room in backward that belongs to no
group, and a configuration can only say for how many layers they are, not for which.

Limit: one number of layers for all stages.
"""

import functools
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from nemo_rl_offload.offload.solver import Action, GroupRecord, Link, MemoryBudget, Solution, solve
from nemo_rl_offload.planner.job import Job, Recompute
from nemo_rl_offload.planner.search.candidates import candidates, recomputable, separable
from nemo_rl_offload.planner.search.suggestions import on_their_way, stage_budget
from nemo_rl_offload.planner.search.to_config import choice_to_config, excess_bytes, in_order, may_fit
from nemo_rl_offload.planner.simulate.simulated_step import SimulatedStep, highest_peak, run_stages, run_steady_state
from nemo_rl_offload.planner.simulate.stages import Stage, build_stages, job_link
from nemo_rl_offload.specs.parallel_layout import stage_layers

_ROUNDS = 6
_MARGIN_BYTES = 64 << 20
_NUM_COUNTS = 6
"""Into so many numbers of layers MLPs are divided."""
_NUM_SIMULATED = 3
_FREE_SHARE = 1e-3
"""Of the step: waits below it are none."""


@functools.lru_cache(maxsize=256)
def chosen_once(groups: tuple[GroupRecord, ...], budget: MemoryBudget, link: Link) -> Solution:
    """`solve`, which ways and budgets ask for the same again."""
    return solve(groups, budget, link)


def fullest_stage(baseline: SimulatedStep) -> int:
    """The rank of the stage with the highest peak."""
    return max(range(len(baseline.stages)), key=baseline.peak_bytes)


def ways(job: Job) -> Iterator[Job]:
    """The job with its configured recomputation, then with ever more."""
    yield job
    given = job.recompute
    if given.method == "uniform":
        return
    if given.method is None:
        yield from (replace(job, recompute=each) for each in _more_modules(job))
    if not job.expert_buffers.has_stash:
        yield from (replace(job, recompute=each) for each in _whole_layers(job))


def _more_modules(job: Job) -> Iterator[Recompute]:
    given, shape = job.recompute, job.shape
    has_experts, has_dense = (kind in shape.layers_with_experts for kind in (True, False))
    names = [name for name in recomputable(job) if name not in given.modules]
    for more in ([name] for name in names) if len(names) > 1 else ():
        yield replace(given, modules=given.modules.union(more))
    if names:
        yield replace(given, modules=given.modules.union(names))
    if has_dense and "mlp" not in given.modules and job.recomputes_mlp_parts:
        yield from _counted(job, "mlp_fc1", "mlp_act")
    elif has_dense and "mlp_fc1" not in given.modules:
        yield from _counted(job, "mlp")
    if has_experts and "moe" not in given.modules and not job.expert_buffers.has_stash:
        yield replace(given, modules=given.modules - {"moe_act"} | {"moe"})


def _counted(job: Job, name: str, *elsewhere: str) -> Iterator[Recompute]:
    """An entry that is for a number of layers, in more than are configured; other entries in the others."""
    given = job.recompute
    most = max(sum(not job.shape.layers_with_experts[layer] for layer in chunk) for chunk in _chunks(job))
    present = (given.num_counted_layers or most) if name in given.modules else 0
    for count in _sixths(most):
        if count == most and present < most:
            yield replace(given, modules=given.modules.difference(elsewhere) | {name}, num_counted_layers=None)
        elif count > present:
            yield replace(given, modules=given.modules.union(elsewhere) | {name}, num_counted_layers=count)


def _whole_layers(job: Job) -> Iterator[Recompute]:
    """The first of each chunk, more than are configured, where no smaller part of a layer would do; then all."""
    given = job.recompute
    if given.method == "block" or any(job.shape.layers_with_experts):
        most = max(map(len, _chunks(job)))
        present = given.num_layers if given.method == "block" else 0
        yield from (Recompute(method="block", num_layers=count) for count in _sixths(most) if present < count < most)
    yield Recompute(method="uniform")


def _chunks(job: Job) -> list[range]:
    return [chunk for stage in stage_layers(job.layout, job.shape.num_layers) for chunk in stage]


def _sixths(most: int) -> list[int]:
    return sorted({math.ceil(most * part / _NUM_COUNTS) for part in range(1, _NUM_COUNTS + 1)})


def choose_for_budget(job: Job, baseline: SimulatedStep) -> tuple[Job, SimulatedStep]:
    """The fastest choice that fits, and the job with its recomputation; else the choice that comes nearest.

    `baseline` is the job's step with nothing offloaded. Megatron-Core's engine takes no layers by themselves: there,
    the steps that count are those of whole modules.
    """
    rank = fullest_stage(baseline)
    found: list[tuple[tuple[int, float], Job, SimulatedStep]] = []

    def add(way: Job, step: SimulatedStep) -> None:
        in_force = step if job.native_engine else choice_to_config(way, step).step
        found.append(((excess_bytes(job, in_force), in_force.step_ms), way, step))

    every = list(ways(job))
    listed = functools.cache(lambda number: _listed(every[number]))
    # The more is recomputed, the less has to move, and the longer it takes.
    first = bisect_left(range(len(every)), True, key=lambda number: listed(number) is not None)
    if first < len(every) and (step := listed(first)) is not None:
        add(every[first], step)
    scored = sorted(((score(way, rank), way) for way in every), key=lambda each: each[0][0])
    for number, ((_, names), way) in enumerate(scored):
        if number >= _NUM_SIMULATED and any(excess == 0 for (excess, _), *_ in found):
            break
        add(way, _choose_all(way, build_stages(way, candidates(way), names)))
    _, way, step = min(found, key=lambda each: each[0])
    return way, step


def _listed(job: Job) -> SimulatedStep | None:
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
        step = run_steady_state(job, modules)
        if highest_peak(step) <= job.budget_bytes:
            is_free = max(map(step.exposed_share, range(len(step.stages)))) < _FREE_SHARE
            return step if is_free and not excess_bytes(job, step) else None
    return None


type Score = tuple[int, float]
"""How far the choice stays above the budget, in bytes, and what a microbatch takes with it, in ms."""


@functools.lru_cache(maxsize=32)
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
    plan = chosen_once(stage.records(), stage_budget(job, stage, on_their_way(stage)), job_link(job))
    return plan.shortfall_bytes, plan.step_ms


def _choose_all(job: Job, stages: Sequence[Stage]) -> SimulatedStep:
    link = job_link(job)
    actions = [[Action.KEEP] * len(stage.records()) for stage in stages]
    step = run_stages(job, stages, actions)
    less = [on_their_way(stage) for stage in stages]
    exhausted: set[int] = set()
    for attempt in range(_ROUNDS):
        over = {rank for rank in range(len(stages)) if step.peak_bytes(rank) > job.budget_bytes} - exhausted
        if not over:
            break
        for rank in over:
            if attempt:
                less[rank] += step.peak_bytes(rank) - job.budget_bytes + _MARGIN_BYTES
            plan = chosen_once(stages[rank].records(), stage_budget(job, stages[rank], less[rank]), link)
            actions[rank] = list(plan.actions)
            if plan.shortfall_bytes:
                exhausted.add(rank)
        step = run_stages(job, stages, actions)
    return step
