"""The plan of a job: what to offload and to recompute on each stage for a memory budget, what it costs, and what else
would fit."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, Required, TypedDict

from nemo_rl_offload.offload.solver import Action
from nemo_rl_offload.planner.cost.memory import allowance_bytes
from nemo_rl_offload.planner.job import Job
from nemo_rl_offload.planner.search.candidates import candidates
from nemo_rl_offload.planner.search.choice import choose_for_budget, chosen_once, fullest_stage, score, ways
from nemo_rl_offload.planner.search.suggestions import stage_budget, suggest
from nemo_rl_offload.planner.search.to_config import ChoiceAsConfig, choice_to_config, excess_bytes
from nemo_rl_offload.planner.simulate.simulated_step import SimulatedStep, highest_peak, run_configured, run_stages
from nemo_rl_offload.planner.simulate.stages import build_stages, job_link
from nemo_rl_offload.specs.recompute import RecomputeKeys
from nemo_rl_offload.units import MIB

_FRONTIER_POINTS = 6
_SLOWER = 1.02
"""Whole modules that take longer than so much of the choice's time are not written."""


class MemoryBudgetKeys(TypedDict):
    """What a plan changes in `activation_offload`."""

    gpu_memory_budget: str


class PlannedKeys(RecomputeKeys, total=False):
    """What a plan changes in `policy.megatron_cfg`."""

    fine_grained_activation_offloading: Required[bool]
    offload_modules: Required[list[str] | Literal["auto"]]
    activation_offload: MemoryBudgetKeys
    activation_offload_fraction: float
    delta_offload_bytes_across_pp_ranks: int
    activation_checkpointing: None


@dataclass(frozen=True)
class JobPlan:
    """Everything that `nemo-rl-offload plan` shows."""

    job: Job
    baseline: SimulatedStep
    """Nothing offloaded."""
    configured: SimulatedStep | None
    """What the engine does with the modules that `offload_modules` lists."""
    chosen: SimulatedStep
    """Chosen for the budget, per module and layer; whole modules where those are as good."""
    chosen_job: Job
    """The job with what the choice recomputes of MLPs or whole layers."""
    written: ChoiceAsConfig
    """The choice as configuration keys can say it."""
    shortfalls: tuple[int, ...]
    """By stage, how far the peak is above the budget: of the choice, or where the engine takes no layers by themselves,
    of whole modules."""
    suggestions: tuple[str, ...]
    """Where the budget is not met: changes that would do, nearest first."""

    @property
    def shortfall_bytes(self) -> int:
        return max(self.shortfalls)

    @cached_property
    def frontier(self) -> "tuple[FrontierPoint, ...]":
        """Memory against step time, the least memory first."""
        return _frontier(self)

    @property
    def needs_layers_to_differ(self) -> bool:
        """Whether the choice fits, and whole modules do not, or take longer."""
        whole = self.written.step
        is_worse = excess_bytes(self.job, whole) > 0 or whole.step_ms > _SLOWER * self.chosen.step_ms
        return self.job.native_engine and not self.shortfall_bytes and is_worse

    @property
    def keys(self) -> PlannedKeys:
        """What the plan changes in `policy.megatron_cfg`: whole modules; where those do not fit and a choice by layers
        does, `auto`, with what the budget leaves to torch's allocator beside the allowances."""
        written = self.written
        keys: PlannedKeys = {
            "fine_grained_activation_offloading": bool(written.offload_modules),
            "offload_modules": list(written.offload_modules),
        }
        if self.needs_layers_to_differ:
            left_bytes = self.job.budget_bytes - sum(allowance_bytes(self.job.device).values())
            keys = {
                "fine_grained_activation_offloading": True,
                "offload_modules": "auto",
                "activation_offload": {"gpu_memory_budget": f"{left_bytes // MIB}MiB"},
            }
        if keys["fine_grained_activation_offloading"]:  # it was simulated so
            keys |= {"activation_offload_fraction": 1.0, "delta_offload_bytes_across_pp_ranks": 0}
        if written.recompute != self.job.recompute:
            recompute = written.recompute.keys
            keys |= {
                "activation_checkpointing": None,  # false would turn off what follows
                "recompute_granularity": recompute["recompute_granularity"],
                "recompute_modules": recompute["recompute_modules"],
                "recompute_method": recompute["recompute_method"],
                "recompute_num_layers": recompute["recompute_num_layers"],
            }
        return keys


def make_plan(job: Job) -> JobPlan:
    """Plan a job: simulate it as it is, choose for its budget, and look for changes where that is not enough."""
    stages = build_stages(job, candidates(job))
    baseline = run_stages(job, stages, [[Action.KEEP] * len(stage.records()) for stage in stages])
    configured = run_configured(job) if job.offload_modules else None
    chosen_job, chosen = job, baseline
    if highest_peak(baseline) > job.budget_bytes:
        chosen_job, chosen = choose_for_budget(job, baseline)
    written = choice_to_config(chosen_job, chosen)
    if _order(job, written.step) < _order(job, chosen):
        chosen_job, chosen = replace(chosen_job, recompute=written.recompute), written.step
    in_force = chosen if job.native_engine else written.step  # Megatron-Core's engine moves whole modules
    shortfalls = tuple(max(0, in_force.peak_bytes(rank) - job.budget_bytes) for rank in range(len(stages)))
    suggestions = suggest(job) if any(shortfalls) else ()
    return JobPlan(job, baseline, configured, chosen, chosen_job, written, shortfalls, suggestions)


def _order(job: Job, step: SimulatedStep) -> tuple[int, float, int]:
    """Smaller is better: what is above the budgets, then time, then memory."""
    return excess_bytes(job, step), _shown_ms(step.step_ms), highest_peak(step)


def _shown_ms(ms: float) -> float:
    """Sums of the same times in another order are equal."""
    return round(ms, 3)


@dataclass(frozen=True)
class FrontierPoint:
    """Device memory against step time."""

    peak_bytes: int
    step_ms: float


def _frontier(plan: JobPlan) -> tuple[FrontierPoint, ...]:
    """What was simulated for the budget, and estimates for others: the least time for budgets from the fullest stage's
    least to its most, whatever is recomputed for it.

    Estimates neglect copies on their way. One within the budget that is faster than what was simulated does not hold.
    """
    simulated = _simulated(plan)
    best_ms = min((point.step_ms for point in simulated if point.peak_bytes <= plan.job.budget_bytes), default=0.0)
    estimates = [
        point
        for point in _estimates(plan, _FRONTIER_POINTS - len(simulated))
        if point.peak_bytes > plan.job.budget_bytes or point.step_ms >= best_ms
    ]
    return _falling([*simulated, *estimates])


def _simulated(plan: JobPlan) -> tuple[FrontierPoint, ...]:
    """The choice, and what is written; none where nothing had to be chosen."""
    if highest_peak(plan.baseline) <= plan.job.budget_bytes:
        return ()
    steps = [plan.chosen, plan.written.step] if plan.job.native_engine else [plan.written.step]
    return _falling([FrontierPoint(highest_peak(each), _shown_ms(each.step_ms)) for each in steps])


def _estimates(plan: JobPlan, number: int) -> list[FrontierPoint]:
    job, rank = plan.job, fullest_stage(plan.baseline)
    *_, least = ways(job)
    jobs = {job: score(job, rank)[1], plan.chosen_job: score(plan.chosen_job, rank)[1], least: ()}
    alone_ms = sum(record.forward_ms + record.backward_ms for record in plan.baseline.stages[rank].records())
    most = plan.baseline.peak_bytes(rank)
    lowest = min(_point(each, names, rank, 0)[0] for each, names in jobs.items())
    points = []
    for budget in (lowest + (most - lowest) * step // (number - 1) for step in range(number)):
        found = [_point(each, names, rank, budget) for each, names in jobs.items()]
        peak_bytes, ms = min((point for point in found if point[0] <= budget), key=lambda point: point[1])
        extra_ms = (ms - alone_ms) * job.num_microbatches
        points.append(FrontierPoint(peak_bytes, _shown_ms(plan.baseline.step_ms + extra_ms)))
    return points


def _point(job: Job, names: Sequence[str], rank: int, budget_bytes: int) -> tuple[int, float]:
    """Peak of a stage and a microbatch's time with the choice for a budget."""
    stage = build_stages(job, candidates(job), names)[rank]
    chosen = chosen_once(stage.records(), replace(stage_budget(job, stage), peak_bytes=budget_bytes), job_link(job))
    return chosen.peak_bytes, chosen.step_ms


def _falling(points: Sequence[FrontierPoint]) -> tuple[FrontierPoint, ...]:
    """Without those that need more memory than another and no less time."""
    kept: list[FrontierPoint] = []
    for point in sorted(points, key=lambda point: (point.peak_bytes, point.step_ms)):
        if not kept or point.step_ms < kept[-1].step_ms:
            kept.append(point)
    return tuple(kept)
