"""Choices as configuration keys can say them: whole modules, or `auto`, and what is recomputed."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Literal, Required, TypedDict

from nemo_rl_offload.offload.solver import Action
from nemo_rl_offload.planner.job import Job, Recompute
from nemo_rl_offload.planner.search.candidates import candidates, separable
from nemo_rl_offload.planner.search.suggestions import on_their_way, stage_budget
from nemo_rl_offload.planner.simulate.simulated_step import (
    SimulatedStep,
    highest_peak,
    run_stages,
    run_steady_state,
)
from nemo_rl_offload.planner.simulate.stages import build_stages
from nemo_rl_offload.specs.offload_modules import NATIVE_MODULES, discarded_by_recompute
from nemo_rl_offload.specs.recompute import RecomputeKeys

_CLOSE = 1.005
"""Of the choice's own time: nothing better is looked for."""
_MOST_TRIES, _FEWEST_TRIES = 48, 4
"""Simulations, the fewer the more stages there are."""

type Names = tuple[frozenset[str], frozenset[str]]
"""Of `offload_modules` and of `recompute_modules`."""


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
class ChoiceAsConfig:
    """What the keys are, and what comes of them."""

    step: SimulatedStep
    """What the engine does with them."""
    offload_modules: tuple[str, ...]
    """Whole modules; none with `auto`."""
    recompute: Recompute
    is_auto: bool = False
    """Whether the engine chooses modules and layers, for the budget (`offload_modules: auto`)."""
    fraction: float = 1.0
    """Of the groups of those modules, the earliest of each forward (`activation_offload_fraction`)."""

    @property
    def peak_bytes(self) -> int:
        """The fullest stage's."""
        return highest_peak(self.step)

    @property
    def step_ms(self) -> float:
        """Sums of the same times in another order are equal."""
        return round(self.step.step_ms, 3)

    def host_excess(self, job: Job) -> int:
        """How far it is above the host's budget."""
        allowed = job.activations_host_budget_bytes
        return max(0, *(self.step.host_bytes(rank) - allowed for rank in range(len(self.step.stages))))

    def order(self, job: Job) -> tuple[int, int, float, int]:
        """Smaller is better: what is above the budgets of host and device, then time, then memory."""
        return self.host_excess(job), max(0, self.peak_bytes - job.budget_bytes), self.step_ms, self.peak_bytes


def planned_keys(job: Job, choice: ChoiceAsConfig) -> PlannedKeys:
    """What a choice changes in `policy.megatron_cfg`: whole modules, or `auto` with what the budget leaves to torch's
    allocator beside the allowances."""
    keys: PlannedKeys = {
        "fine_grained_activation_offloading": bool(choice.offload_modules),
        "offload_modules": list(choice.offload_modules),
    }
    if choice.is_auto:
        keys = {
            "fine_grained_activation_offloading": True,
            "offload_modules": "auto",
            "activation_offload": {"gpu_memory_budget": f"{job.auto_budget_mib}MiB"},
        }
    if keys["fine_grained_activation_offloading"]:  # it was simulated so
        keys |= {"activation_offload_fraction": choice.fraction, "delta_offload_bytes_across_pp_ranks": 0}
    if choice.recompute != job.recompute:
        recompute = choice.recompute.keys
        keys |= {
            "activation_checkpointing": None,  # false would turn off what follows
            "recompute_granularity": recompute["recompute_granularity"],
            "recompute_modules": recompute["recompute_modules"],
            "recompute_method": recompute["recompute_method"],
            "recompute_num_layers": recompute["recompute_num_layers"],
        }
    return keys


class Trials:
    """What was tried for a job, each simulated once."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._found: dict[tuple[Recompute, tuple[str, ...] | None, float], ChoiceAsConfig] = {}

    @property
    def whole(self) -> list[ChoiceAsConfig]:
        """Those of whole modules."""
        return [each for each in self._found.values() if not each.is_auto]

    @property
    def auto(self) -> list[ChoiceAsConfig]:
        """Those whose layers the engine chooses."""
        return [each for each in self._found.values() if each.is_auto]

    def __len__(self) -> int:
        return len(self._found)

    def try_modules(self, recompute: Recompute, modules: Collection[str], fraction: float = 1.0) -> ChoiceAsConfig:
        """Offload these of every layer."""
        ordered = in_order(modules)
        if (found := self._found.get((recompute, ordered, fraction))) is None:
            job = replace(self._job, recompute=recompute)
            step = run_steady_state(job, ordered, fraction) if ordered else run_nothing(job)
            found = ChoiceAsConfig(step, ordered, recompute, fraction=fraction)
            self._found[recompute, ordered, fraction] = found
        return found

    def try_auto(self, recompute: Recompute, run: Callable[[Job], SimulatedStep]) -> ChoiceAsConfig:
        """Let the engine choose; `run` is what it does with a job."""
        if (found := self._found.get((recompute, None, 1.0))) is None:
            step = run(replace(self._job, recompute=recompute))
            found = self._found[recompute, None, 1.0] = ChoiceAsConfig(step, (), recompute, is_auto=True)
        return found

    def try_less(self, choice: ChoiceAsConfig) -> Iterator[ChoiceAsConfig]:
        """The choice without one entry that is recomputed more than is configured, or without modules of which nothing
        moves."""
        if choice.is_auto:
            return
        moving = set(offloaded_bytes(choice.step))
        if (left := in_order(moving.intersection(choice.offload_modules))) != choice.offload_modules:
            yield self.try_modules(choice.recompute, left, choice.fraction)
        given = self._job.recompute.modules
        for name in sorted(choice.recompute.modules - given):
            recompute = replace(choice.recompute, modules=(choice.recompute.modules - {name}) | given)
            yield self.try_modules(recompute, choice.offload_modules, choice.fraction)


def choice_to_config(job: Job, chosen: SimulatedStep, trials: Trials | None = None) -> ChoiceAsConfig:
    """Turn a choice into whole modules: of those tried, the fastest that keep device and host within the budget.

    `job` is the one that was chosen for, with its recomputation. It begins with all that the choice touches, and with
    as little of that as may fit; from the better of the two, one module or entry of `recompute_modules` at a time comes
    or goes, as long as that helps.
    """
    sizes = offloaded_bytes(chosen)
    everything = _without_conflicts(job, (frozenset(sizes), job.recompute.modules | _recomputed(chosen)))
    search = _Search(job, trials or Trials(job))
    best = min((everything, _lean(job, everything, sizes)), key=search.rank)
    while search.rank(best) > (0, _CLOSE * chosen.step_ms) and search.has_tries:
        nearest = min(search.neighbors(best), key=search.rank)
        if search.rank(nearest) >= search.rank(best):
            break
        best = nearest
    return search.tried[best]


def _lean(job: Job, names: Names, sizes: Counter[str]) -> Names:
    """Less those that the budget may do without: recomputation first, then modules with the most bytes to copy."""
    modules, recomputed = names
    for name in sorted(recomputed - job.recompute.modules):
        if _fits(job, (modules, recomputed - {name})):
            recomputed -= {name}
    for module, _ in sizes.most_common():
        if _fits(job, (modules - {module}, recomputed)):
            modules -= {module}
    return modules, recomputed


def try_around(job: Job, choice: ChoiceAsConfig, trials: Trials) -> None:
    """Try a choice of whole modules with one module, or one entry of `recompute_modules`, more or less."""
    search = _Search(replace(job, recompute=choice.recompute), trials)
    for each in search.neighbors((frozenset(choice.offload_modules), choice.recompute.modules)):
        search.rank(each)


class _Search:
    """Whole modules and what comes of them, each simulated once."""

    def __init__(self, job: Job, trials: Trials) -> None:
        self._job = job
        self._trials = trials
        stages = build_stages(job, candidates(job), separable(job))
        groups = [group for stage in stages for group in stage.groups() if group is not None]
        self._modules = {group.module for group in groups if group.can_offload}
        self._recomputable = {group.recomputed_by for group in groups if group.recomputed_by is not None}
        self._num_tries = max(_FEWEST_TRIES, _MOST_TRIES // job.layout.pipeline)
        self.tried: dict[Names, ChoiceAsConfig] = {}

    @property
    def has_tries(self) -> bool:
        return len(self.tried) < self._num_tries

    def rank(self, names: Names) -> tuple[int, float]:
        """How far it is above the device's budget or the host's, and its time."""
        if names not in self.tried:
            recompute = replace(self._job.recompute, modules=names[1])
            self.tried[names] = self._trials.try_modules(recompute, names[0])
        step = self.tried[names].step
        return excess_bytes(self._job, step), step.step_ms

    def neighbors(self, names: Names) -> Iterator[Names]:
        """With one more or one less, as far as there are tries; those tried before too."""
        modules, recomputed = names
        found = [(modules ^ {module}, recomputed) for module in sorted(self._modules)]
        found += [(modules, recomputed ^ {name}) for name in sorted(self._recomputable)]
        for each in found:
            if self.has_tries or each in self.tried:
                yield _without_conflicts(self._job, each)
        yield names


def excess_bytes(job: Job, step: SimulatedStep) -> int:
    """How far a step is above the budget of the device, or that of the host where it is further."""
    host_bytes = max(step.host_bytes(rank) for rank in range(len(step.stages)))
    return max(0, highest_peak(step) - job.budget_bytes, host_bytes - job.activations_host_budget_bytes)


def offloaded_bytes(step: SimulatedStep) -> Counter[str]:
    """By module, of one microbatch of each stage."""
    sizes: Counter[str] = Counter()
    for stage, actions in zip(step.stages, step.actions, strict=True):
        for record, action in zip(stage.records(), actions, strict=True):
            if action is Action.OFFLOAD:
                sizes[record.module] += record.saved_bytes
    return sizes


def _recomputed(step: SimulatedStep) -> set[str]:
    """Entries of `recompute_modules` that a choice by layers takes."""
    found: set[str] = set()
    for stage, actions in zip(step.stages, step.actions, strict=True):
        for group, action in zip(stage.groups(), actions, strict=True):
            if action is Action.RECOMPUTE:
                assert group is not None
                assert group.recomputed_by is not None
                found.add(group.recomputed_by)
    return found


def _without_conflicts(job: Job, names: Names) -> Names:
    """Where layers of the choice differ, whole modules may save what an entry of `recompute_modules` discards: then the
    entry goes if all fits without it, else the module."""
    modules, recomputed = names
    for name, discarded in discarded_by_recompute(job.shape.latent_attention is not None).items():
        clash = set(discarded).intersection(in_order(modules)) if name in recomputed else set()
        if not clash:
            continue
        if name not in job.recompute.modules and _fits(job, (modules, recomputed - {name})):
            recomputed -= {name}
        else:
            modules -= {*clash, "attn_proj"} if "core_attn" in clash else clash
    return modules, recomputed


def run_nothing(job: Job) -> SimulatedStep:
    """Nothing offloaded, told by the modules that could be."""
    stages = build_stages(job, candidates(job))
    static = [
        stage.static_bytes for stage in build_stages(job, ())
    ]  # nothing of a layer is gone before it is recomputed
    stages = tuple(replace(stage, static_bytes=each) for stage, each in zip(stages, static, strict=True))
    return run_stages(job, stages, [[Action.KEEP] * len(stage.records()) for stage in stages])


def listable(job: Job, modules: Collection[str]) -> tuple[str, ...]:
    """Those of these modules that may be listed beside what the job recomputes."""
    return in_order(_without_conflicts(job, (frozenset(modules), job.recompute.modules))[0])


def _fits(job: Job, names: Names) -> bool:
    return may_fit(replace(job, recompute=replace(job.recompute, modules=names[1])), names[0])


def may_fit(job: Job, modules: Collection[str]) -> bool:
    """Whether these modules leave what the budget has room for, with the two largest groups on their way."""
    for stage in build_stages(job, in_order(modules)):
        budget = stage_budget(job, stage, on_their_way(stage))
        stays = sum(record.saved_bytes * record.live_at_peak for record in stage.records() if not record.can_offload)
        if budget.fixed_bytes + stays > budget.peak_bytes:
            return False
    return True


def in_order(modules: Collection[str]) -> tuple[str, ...]:
    """Modules in their usual order; Megatron-Core lets attn_proj be offloaded only beside core_attn."""
    named = {*modules, "core_attn"} if "attn_proj" in modules else modules
    return tuple(module for module in NATIVE_MODULES if module in named)
