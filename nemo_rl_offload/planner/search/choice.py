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
5. The fastest of these is a guide: no configuration says it, for it recomputes single layers. From it begins the search
   for whole modules (`to_config`); what `auto` would do is simulated for its recomputation.
6. What takes the least memory is tried in any case, and more for other budgets, and what is around a near miss.
7. Of all that was tried as keys can say it, the fastest that fits is taken. What a plan shows or says of others, the
   least memory and the frontier, is of the same trials.

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
from itertools import islice

from nemo_rl_offload.offload.solver import Action, GroupRecord, Link, MemoryBudget, Solution, solve
from nemo_rl_offload.planner.job import Job, Recompute
from nemo_rl_offload.planner.search.candidates import candidates, recomputable, separable
from nemo_rl_offload.planner.search.suggestions import least_shortfall, on_their_way, stage_budget
from nemo_rl_offload.planner.search.to_config import (
    ChoiceAsConfig,
    Trials,
    choice_to_config,
    excess_bytes,
    in_order,
    listable,
    may_fit,
    run_nothing,
    try_around,
)
from nemo_rl_offload.planner.simulate.simulated_step import SimulatedStep, highest_peak, run_stages, run_steady_state
from nemo_rl_offload.planner.simulate.stages import Stage, build_stages, job_link
from nemo_rl_offload.specs.offload_modules import discarded_by_recompute
from nemo_rl_offload.specs.parallel_layout import stage_layers

_ROUNDS = 6
_MARGIN_BYTES = 64 << 20
_NUM_COUNTS = 6
"""Into so many numbers of layers MLPs are divided."""
_NUM_SIMULATED = 3
_MOST_TRIES, _FEWEST_TRIES = 32, 8
"""Simulated lists of modules for other budgets, the fewer the more stages there are."""
_SLOWER = 1.02
"""Lists of modules that take longer than so much of the time with `auto` are not chosen."""
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
    has_experts, has_dense = shape.has_experts, shape.has_dense_layers
    names = [name for name in recomputable(job) if name not in given.modules]
    for more in ([name] for name in names) if len(names) > 1 else ():
        yield replace(given, modules=given.modules.union(more))
    if names:
        yield replace(given, modules=given.modules.union(names))
    if shape.has_states and "core_attn" not in given.modules:  # a recurrence saves most of a layer
        yield replace(given, modules=given.modules | {"core_attn"})
        yield replace(given, modules=given.modules.union(names, ["core_attn"]))
    if has_dense and "mlp" not in given.modules and job.recomputes_mlp_parts:
        yield from _counted(job, "mlp_fc1", "mlp_act")
    elif has_dense and "mlp_fc1" not in given.modules:
        yield from _counted(job, "mlp")
    if has_experts and "moe" not in given.modules and not job.expert_buffers.has_stash:
        yield replace(given, modules=given.modules - {"moe_act"} | {"moe"})


def _counted(job: Job, name: str, *elsewhere: str) -> Iterator[Recompute]:
    """An entry that is for a number of layers, in more than are configured; other entries in the others."""
    given = job.recompute
    most = max(sum(job.shape.layer_kinds[layer].mlp == "dense" for layer in chunk) for chunk in _chunks(job))
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


def choose(job: Job, baseline: SimulatedStep, trials: Trials) -> ChoiceAsConfig:
    """The fastest choice that fits, of all that is tried; else the one that comes nearest. Lists of modules are simpler
    than `auto`, and are taken where they are not `_SLOWER`, unless it is configured.

    `baseline` is the job's step with nothing offloaded.
    """
    nothing = trials.try_modules(job.recompute, ())
    fits = highest_peak(baseline) <= job.budget_bytes
    if not fits:
        way, guide = _guide(job, baseline, trials)
        best = choice_to_config(way, guide, trials)
        list(_try_least(job, trials))
        if can_be_auto(job):
            for recompute in dict.fromkeys((best.recompute, way.recompute)):
                trials.try_auto(recompute, run_auto)
    for recompute, modules in islice(_others(job), max(_FEWEST_TRIES, _MOST_TRIES // job.layout.pipeline)):
        trials.try_modules(recompute, modules)
    if fits:
        return nothing
    _try_less_memory(job, trials)
    _try_near_misses(job, trials)
    return best_tried(job, trials)


def _try_near_misses(job: Job, trials: Trials) -> None:
    """Around what is faster than the best that fits, and takes the least beyond the budget."""
    best = best_tried(job, trials)
    missed = [
        each
        for each in trials.whole
        if each.step_ms < best.step_ms and each.peak_bytes > job.budget_bytes and not each.host_excess(job)
    ]
    if missed and best.peak_bytes <= job.budget_bytes:
        try_around(job, min(missed, key=lambda each: each.peak_bytes), trials)


def _try_less_memory(job: Job, trials: Trials) -> None:
    """Where nothing fits: other ways, with all modules, that may take less memory."""
    for way in ways(job):
        on_host, on_device, *_ = min(each.order(job) for each in (*trials.whole, *trials.auto))
        if not on_device or on_host:
            return
        if least_shortfall(way, with_copies=False) < on_device:
            trials.try_modules(way.recompute, listable(way, by_bytes(way)[-1]))
            if can_be_auto(job):
                trials.try_auto(way.recompute, run_auto)


def best_tried(job: Job, trials: Trials) -> ChoiceAsConfig:
    """The fastest that fits of all that was tried so far, without what moves or recomputes nothing; see `choose`."""
    best = min(trials.whole, key=lambda each: each.order(job))
    while (less := min(trials.try_less(best), key=lambda each: each.order(job), default=None)) is not None:
        if less.order(job) > best.order(job):
            break
        best = less
    auto = min(trials.auto, key=lambda each: each.order(job), default=best)
    excess, auto_excess = _excess(job, best), _excess(job, auto)
    slower = 1.0 if job.is_auto else _SLOWER
    is_better = auto_excess < excess or (auto_excess == excess and best.step_ms > slower * auto.step_ms)
    return auto if is_better else best


def _excess(job: Job, choice: ChoiceAsConfig) -> tuple[int, int]:
    """Above the budgets of host and device; `auto` has to keep what it is told."""
    on_host, on_device, *_ = choice.order(job)
    if choice.is_auto and choice.peak_bytes > job.auto_budget_bytes:
        on_device = max(1, on_device)
    return on_host, on_device


def can_be_auto(job: Job) -> bool:
    """Whether `auto` is something to choose: this project's engine takes it, with a budget of a MiB or more."""
    return job.native_engine and job.auto_budget_mib > 0


def run_auto(job: Job) -> SimulatedStep:
    """What `offload_modules: auto` is planned to do with the job's budget: modules and layers differ."""
    if highest_peak(nothing := run_nothing(job)) <= job.auto_budget_bytes:
        return nothing
    is_latent = job.shape.latent_attention is not None
    discarded = {name for entry in job.recompute.modules for name in discarded_by_recompute(is_latent).get(entry, ())}
    modules = [name for name in candidates(job) if name not in discarded]
    return _choose_all(job, build_stages(job, modules), job.auto_budget_bytes)


def as_configured(job: Job, trials: Trials) -> ChoiceAsConfig | None:
    """What the engine does with `offload_modules`; None where it has nothing to do."""
    if job.is_auto:
        return trials.try_auto(job.recompute, run_auto) if can_be_auto(job) else None
    return trials.try_modules(job.recompute, job.offload_modules, job.offload_fraction) if job.offload_modules else None


def _try_least(job: Job, trials: Trials) -> Iterator[ChoiceAsConfig]:
    """What takes the least memory: all modules, `auto`, and what is recomputed alone, the first way or the last."""
    every = list(ways(job))
    way = min((every[-1], every[0]), key=least_shortfall)
    if least_shortfall(way, with_copies=False) > 0:
        return
    yield trials.try_modules(way.recompute, listable(way, by_bytes(way)[-1]))
    if can_be_auto(job):
        yield trials.try_auto(way.recompute, run_auto)
    yield trials.try_modules(way.recompute, ())


def surely_fits(job: Job) -> bool:
    """Whether what takes the least memory fits, which `choose` tries too."""
    return any(_excess(job, each) == (0, 0) for each in _try_least(job, Trials(job)))


def surely_lacks(job: Job) -> int:
    """How much every way lacks, by its formulas: 0 where one may fit."""
    return min(least_shortfall(way, with_copies=False) for way in ways(job))


def _others(job: Job) -> Iterator[tuple[Recompute, tuple[str, ...]]]:
    """More to try, the same for every budget: the most different first."""
    every = [way.recompute for way in ways(job)]
    orders = {}
    for each in (every[-1], job.recompute):
        way = replace(job, recompute=each)
        orders[each] = [listable(way, modules) for modules in by_bytes(way)]
    for end in (-1, 0):
        yield from ((each, lists[end]) for each, lists in orders.items())
    yield from ((each, ()) for each in every)
    for each, lists in orders.items():
        yield from ((each, modules) for modules in lists)


def by_bytes(job: Job) -> list[tuple[str, ...]]:
    """No module, that with the least bytes, and ever more."""
    sizes: Counter[str] = Counter()
    for stage in build_stages(job, candidates(job)):
        for record in stage.records():
            if record.can_offload:
                sizes[record.module] += record.saved_bytes * record.live_at_peak
    ordered = [module for module, _ in reversed(sizes.most_common())]
    return [in_order(ordered[:number]) for number in range(len(ordered) + 1)]


def _guide(job: Job, baseline: SimulatedStep, trials: Trials) -> tuple[Job, SimulatedStep]:
    """The fastest choice by layers that fits, and the job with its recomputation; else the choice that comes nearest.

    No configuration says what is recomputed of single layers: it is where the search for lists begins. Megatron-Core's
    engine takes no layers by themselves: there, the steps that count are those of whole modules.
    """
    rank = fullest_stage(baseline)
    found: list[tuple[tuple[int, float], Job, SimulatedStep]] = []

    def add(way: Job, step: SimulatedStep) -> None:
        in_force = step if job.native_engine else choice_to_config(way, step, trials).step
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
        add(way, _choose_all(way, build_stages(way, candidates(way), names), job.budget_bytes))
    _, way, step = min(found, key=lambda each: each[0])
    return way, step


def _listed(job: Job) -> SimulatedStep | None:
    """What the engine does with all layers of some modules, those with the least bytes first: None where such a choice
    does not fit, or makes compute wait."""
    for modules in by_bytes(job):
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


def _choose_all(job: Job, stages: Sequence[Stage], budget_bytes: int) -> SimulatedStep:
    link = job_link(job)
    actions = [[Action.KEEP] * len(stage.records()) for stage in stages]
    step = run_stages(job, stages, actions)
    less = [job.budget_bytes - budget_bytes + on_their_way(stage) for stage in stages]
    exhausted: set[int] = set()
    for attempt in range(_ROUNDS):
        over = {rank for rank in range(len(stages)) if step.peak_bytes(rank) > budget_bytes} - exhausted
        if not over:
            break
        for rank in over:
            if attempt:
                less[rank] += step.peak_bytes(rank) - budget_bytes + _MARGIN_BYTES
            plan = chosen_once(stages[rank].records(), stage_budget(job, stages[rank], less[rank]), link)
            actions[rank] = list(plan.actions)
            if plan.shortfall_bytes:
                exhausted.add(rank)
        step = run_stages(job, stages, actions)
    return step
