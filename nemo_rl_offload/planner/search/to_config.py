"""A choice as configuration keys can say it: whole modules, and what is recomputed."""

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from nemo_rl_offload.offload.solver import Action
from nemo_rl_offload.planner.job import Job, Recompute
from nemo_rl_offload.planner.search.candidates import candidates, separable
from nemo_rl_offload.planner.search.suggestions import on_their_way, stage_budget
from nemo_rl_offload.planner.simulate.simulated_step import SimulatedStep, highest_peak, run_steady_state
from nemo_rl_offload.planner.simulate.stages import build_stages
from nemo_rl_offload.specs.offload_modules import NATIVE_MODULES, discarded_by_recompute

_CLOSE = 1.005
"""Of the choice's own time: nothing better is looked for."""
_MOST_TRIES, _FEWEST_TRIES = 48, 4
"""Simulations, the fewer the more stages there are."""

type Names = tuple[frozenset[str], frozenset[str]]
"""Of `offload_modules` and of `recompute_modules`."""


@dataclass(frozen=True)
class ChoiceAsConfig:
    """What the keys are, and what comes of them."""

    step: SimulatedStep
    """What the engine does with whole modules."""
    offload_modules: tuple[str, ...]
    recompute: Recompute


def choice_to_config(job: Job, chosen: SimulatedStep) -> ChoiceAsConfig:
    """Turn a choice into whole modules: of those tried, the fastest that keep device and host within the budget.

    `job` is the one that was chosen for, with its recomputation. It begins with all that the choice touches, and with
    as little of that as may fit; from the better of the two, one module or entry of `recompute_modules` at a time comes
    or goes, as long as that helps.
    """
    sizes, recomputed = _touched(chosen)
    everything = _without_conflicts(job, (frozenset(sizes), job.recompute.modules | recomputed))
    search = _Search(job)
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


class _Search:
    """Whole modules and what comes of them, each simulated once."""

    def __init__(self, job: Job) -> None:
        self._job = job
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
            self.tried[names] = _run(self._job, names)
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
    return max(0, highest_peak(step) - job.budget_bytes, host_bytes - job.host_budget_bytes)


def _touched(chosen: SimulatedStep) -> tuple[Counter[str], set[str]]:
    """Offloaded bytes by module, and entries of `recompute_modules`."""
    sizes: Counter[str] = Counter()
    recomputed: set[str] = set()
    for stage, actions in zip(chosen.stages, chosen.actions, strict=True):
        for record, group, action in zip(stage.records(), stage.groups(), actions, strict=True):
            if action is Action.OFFLOAD:
                sizes[record.module] += record.saved_bytes
            elif action is Action.RECOMPUTE:
                assert group is not None
                assert group.recomputed_by is not None
                recomputed.add(group.recomputed_by)
    return sizes, recomputed


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


def _recomputing(job: Job, recomputed: frozenset[str]) -> Job:
    return replace(job, recompute=replace(job.recompute, modules=recomputed))


def _run(job: Job, names: Names) -> ChoiceAsConfig:
    modules, changed = in_order(names[0]), _recomputing(job, names[1])
    return ChoiceAsConfig(run_steady_state(changed, modules), modules, changed.recompute)


def _fits(job: Job, names: Names) -> bool:
    return may_fit(_recomputing(job, names[1]), names[0])


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
