"""The plan of a job: what to offload and to recompute on each stage for a memory budget, what it costs, and what else
would fit."""

import math
from dataclasses import dataclass, replace
from functools import cache

from nemo_rl_offload.planner.job import Job, Recompute
from nemo_rl_offload.planner.phases import (
    OF_LAYOUT,
    OF_MODEL,
    UPDATE,
    UPDATE_BYTES,
    PhasesOfStage,
    lacking,
    update_lacks,
)
from nemo_rl_offload.planner.search.choice import as_configured, best_tried, choose, surely_fits, surely_lacks
from nemo_rl_offload.planner.search.frontier import frontier
from nemo_rl_offload.planner.search.layout_search import FoundLayout, LayoutAdvice
from nemo_rl_offload.planner.search.suggestions import NONE_TRIED, suggest
from nemo_rl_offload.planner.search.to_config import ChoiceAsConfig, PlannedKeys, Trials, planned_keys
from nemo_rl_offload.planner.simulate.simulated_step import SimulatedStep


@dataclass(frozen=True)
class JobPlan:
    """Everything that `nemo-rl-offload plan` shows."""

    job: Job
    baseline: SimulatedStep
    """Nothing offloaded."""
    configured: SimulatedStep | None
    """What the engine does with `offload_modules`."""
    choice: ChoiceAsConfig
    """Chosen for the budget: the fastest of what was tried that fits; else the one that comes nearest."""
    written: ChoiceAsConfig
    """The best of whole modules: the choice, but where that is `auto`."""
    frontier: "tuple[ChoiceAsConfig, ...]"
    """Memory against step time of what was tried, the least memory first."""
    suggestions: tuple[str, ...]
    """Where the budget is not met: changes that would do, nearest first."""
    without_recomputation: ChoiceAsConfig | None
    """Where recomputation is configured, and nothing needs it: the step without it, nothing offloaded."""
    advice: LayoutAdvice | None = None
    """Where something lacks that other layouts have room for: what was found of these, if they were searched."""

    @property
    def layouts(self) -> tuple[FoundLayout, ...]:
        """That have room, where they were searched."""
        return self.advice.found if self.advice else ()

    @property
    def chosen(self) -> SimulatedStep:
        """The choice's step."""
        return self.choice.step

    @property
    def chosen_job(self) -> Job:
        """The job with what the choice recomputes."""
        return replace(self.job, recompute=self.choice.recompute)

    @property
    def shortfalls(self) -> tuple[int, ...]:
        """By stage, how far the choice's peak is above the budget."""
        ranks = range(len(self.chosen.stages))
        return tuple(max(0, self.chosen.peak_bytes(rank) - self.job.budget_bytes) for rank in ranks)

    @property
    def shortfall_bytes(self) -> int:
        return max(self.shortfalls)

    @property
    def lacking(self) -> list[str]:
        """What is missing beside the training step, in a sentence for each."""
        return list(lacking(self.chosen_job, self.chosen, training_fits=not self.shortfall_bytes))

    @property
    def least_optimizer_share(self) -> float | None:
        """Where the optimizer's state waits in host memory, the share of it, in twentieths, with which the choice fits
        too: less crosses the link. None where that is not less."""
        given = self.job.optimizer.share_on_host
        if not given or self.shortfall_bytes:
            return None
        each_bytes = self.job.optimizer.state_bytes + self.job.optimizer.master_bytes
        shares = [0.0]
        for rank, sizes in enumerate(self.job.resident_host_bytes):
            for phase in PhasesOfStage(self.job, self.chosen, rank).phases() if "optimizer" in sizes else ():
                growth = sizes["optimizer"] / given
                if phase.name == UPDATE:
                    growth *= 1 + UPDATE_BYTES / each_bytes
                shares.append(given - (self.job.budget_bytes - phase.peak_bytes) / growth)
        share = math.ceil(20 * max(shares)) / 20
        return share if share < given else None

    @property
    def keys(self) -> PlannedKeys:
        """What the choice changes in `policy.megatron_cfg`."""
        return planned_keys(self.job, self.choice)


def make_plan(job: Job, with_suggestions: bool = True) -> JobPlan:
    """Plan a job: simulate it as it is, choose for its budget, and look for changes where that is not enough."""
    trials = Trials(job)
    baseline = trials.try_modules(job.recompute, ()).step
    configured = as_configured(job, trials)
    choice = choose(job, baseline, trials)
    while True:
        written = min(trials.whole, key=lambda each: each.order(job)) if choice.is_auto else choice
        points = frontier(job, choice, written, trials)
        num_tried = len(trials.whole)
        if choice.step is baseline:
            break
        found = best_tried(job, trials)  # what is shown was tried with less, which may be the faster
        if found.order(job) < choice.order(job):
            choice = found
        elif len(trials.whole) == num_tried:
            break
    plan = JobPlan(
        job,
        baseline,
        None if configured is None else configured.step,
        choice,
        written,
        points,
        (),
        _without_recomputation(job),
    )
    if not (plan.shortfall_bytes and with_suggestions):
        return plan

    @cache
    def plain(changed: Job) -> SimulatedStep:
        return Trials(changed).try_modules(changed.recompute, ()).step

    @cache
    def of_update(changed: Job) -> int:
        return update_lacks(changed, plain(changed))

    def of_others(changed: Job) -> list[str]:
        return list(lacking(changed, plain(changed)))

    def fits(changed: Job) -> bool:
        return surely_fits(changed) and not of_update(changed)

    def at_least(changed: Job) -> int:
        return max(surely_lacks(changed), of_update(changed))

    def shortfall(changed: Job) -> int:
        return max(make_plan(changed, with_suggestions=False).shortfall_bytes, of_update(changed))

    return replace(plan, suggestions=suggest(job, fits, at_least, shortfall, of_update, of_others))


def asks_for_layouts(plan: JobPlan) -> bool:
    """Whether something lacks that another layout may have room for. What a generating engine or the passes for
    log-probabilities lack beside training, keys of their own change."""
    return bool(plan.shortfall_bytes) or any(text.startswith(OF_LAYOUT) or OF_MODEL in text for text in plan.lacking)


def with_advice(plan: JobPlan, advice: LayoutAdvice) -> JobPlan:
    """The plan with layouts that were searched; where some have room, without changes that would not do."""
    would_do = tuple(text for text in plan.suggestions if not text.startswith(NONE_TRIED))
    return replace(plan, advice=advice, suggestions=would_do if advice.found else plan.suggestions)


def _without_recomputation(job: Job) -> ChoiceAsConfig | None:
    """It is left as configured, for who configured it may know why."""
    if job.recompute == Recompute():
        return None
    without = Trials(job).try_modules(Recompute(), ())
    return without if without.peak_bytes <= job.budget_bytes else None
