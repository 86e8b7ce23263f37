"""A choice as configuration keys can say it: whole modules, and what is recomputed."""

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from nemo_rl_offload.planner.changes import on_their_way, stage_budget
from nemo_rl_offload.planner.choose import Action
from nemo_rl_offload.planner.job import Job, Recompute
from nemo_rl_offload.planner.modules import DISCARDED_BY_RECOMPUTE, NATIVE_MODULES
from nemo_rl_offload.planner.outcome import Outcome, highest_peak, run_listed_modules
from nemo_rl_offload.planner.stages import build_stages

type Names = tuple[frozenset[str], frozenset[str]]
"""Of `offload_modules` and of `recompute_modules`."""


@dataclass(frozen=True)
class Written:
    """What the keys are, and what comes of them."""

    outcome: Outcome
    """What the engine does with whole modules."""
    offload_modules: tuple[str, ...]
    recompute: Recompute


def write_choice(job: Job, chosen: Outcome) -> Written:
    """Turn a choice into whole modules: all that it touches somewhere, less those that the budget does not need.

    `job` is the one that was chosen for, with its recomputation. Of what the choice recomputes besides, entries are
    dropped first, then modules, those with the most bytes to copy first.
    """
    sizes, recomputed = _touched(chosen)
    everything = _without_conflicts(job, (frozenset(sizes), job.recompute.modules | recomputed))
    modules, names = everything
    for name in sorted(names - job.recompute.modules):
        if _fits(job, (modules, names - {name})):
            names -= {name}
    for module, _ in sizes.most_common():
        if _fits(job, (modules - {module}, names)):
            modules -= {module}
    written = _run(job, (modules, names))
    if highest_peak(written.outcome) > job.budget_bytes:
        written = _run(job, everything)
    return written


def _touched(chosen: Outcome) -> tuple[Counter[str], set[str]]:
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
    for name, discarded in _conflicts(job):
        clash = modules.intersection(discarded) if name in recomputed else frozenset[str]()
        if not clash:
            continue
        if name not in job.recompute.modules and _fits(job, (modules, recomputed - {name})):
            recomputed -= {name}
        else:
            modules -= clash
    return modules, recomputed


def _conflicts(job: Job) -> Iterator[tuple[str, tuple[str, ...]]]:
    """As `check` has them: without latent attention, attention's modules save nothing that is discarded."""
    for name, modules in DISCARDED_BY_RECOMPUTE.items():
        is_latent = job.shape.latent_attention is not None
        yield name, tuple(module for module in modules if is_latent or module not in ("qkv_linear", "core_attn"))


def _recomputing(job: Job, recomputed: frozenset[str]) -> Job:
    return replace(job, recompute=replace(job.recompute, modules=recomputed))


def _run(job: Job, names: Names) -> Written:
    modules, changed = in_order(names[0]), _recomputing(job, names[1])
    return Written(run_listed_modules(changed, modules), modules, changed.recompute)


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
