"""Finds the layouts in which a job takes the least time on its ranks, and has room.

1. Estimates (`layouts`): every base whose weights and gradients have room, with the time of its variants.
2. From the fastest on: the least memory of a base, with whole layers recomputed, all offloaded and all of the optimizer
   on the host, decides whether it can have room at all. Then its fastest variants are cut into stages for each way of
   recomputation. The formulas say whether it fits as it is, with offloading, or with some of the optimizer on the host.
   This ends where no base can be faster than what was found, or after so many stages.
3. The best of these are read as configurations are, with what `check` refuses left out, and simulated as `plan` does:
   with nothing offloaded, else with lists of modules. What was found is what was simulated.

Times in the order are of the simulated step, of messages between ranks (`cost.messages`) and of the optimizer's way
through the device. Recomputation and offloading are chosen afresh, whatever is configured.

Rejected: a full plan of each layout, which takes seconds where a pipeline is long. A plan for what was found may
offload or recompute better; it never does worse.
"""

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from nemo_rl_offload.planner.cost.memory import EIGHT_BIT_COPIES
from nemo_rl_offload.planner.cost.messages import messages_ms
from nemo_rl_offload.planner.job import Job, Recompute
from nemo_rl_offload.planner.phases import host_use, lacking, least_share, update_bytes
from nemo_rl_offload.planner.search.candidates import candidates
from nemo_rl_offload.planner.search.choice import by_bytes, ways
from nemo_rl_offload.planner.search.layout_keys import job_keys, paths_of
from nemo_rl_offload.planner.search.layouts import Base, LayoutTask, bases, pipelined_ms
from nemo_rl_offload.planner.search.suggestions import least_shortfall, on_their_way
from nemo_rl_offload.planner.search.to_config import ChoiceAsConfig, Trials, listable, may_fit, planned_keys
from nemo_rl_offload.planner.simulate.stages import Stage, build_stages, job_link
from nemo_rl_offload.specs.devices import Device
from nemo_rl_offload.specs.pipeline_layout import SECTION

_NUM_VARIANTS = 3
"""Of a base that are looked at, beside its smallest."""
_NUM_OPTIONS = 2
"""Of a base that may be simulated: so many that offload, and so many that do not."""
_MOST_STAGES = 6000
"""Stages that are cut: a bound on the time, the same on every machine."""
_MOST_SIMULATED = 150_000
"""Layers in microbatches that are simulated: likewise a bound on the time."""
_MOST_READ = 200
"""Configurations that are read and checked."""
_COST_OF_COPIES = 4
"""Times as long as one without copies takes a simulation with them."""
_REACHED = 0.8
"""Of the link, which an engine that lets nobody wait makes use of."""


@dataclass(frozen=True)
class LayoutAdvice:
    """What a search found."""

    found: tuple["FoundLayout", ...]
    """The fastest first; empty where none that was tried fits."""
    device: Device
    budget_bytes: int
    world: int
    """Ranks that are configured."""
    most_world: int
    """Ranks for which layouts were searched last."""
    blocked: tuple[str, ...] = ()
    """What the fastest layout lacks that has room for training, but not for something else; empty where there is none,
    or one that has room for all."""
    configured: "FoundLayout | None" = None
    """The configuration as it is, beside which they are shown; it need not fit."""

    @property
    def fits(self) -> bool:
        """Whether one was found for the configured ranks."""
        return bool(self.found) and self.found[0].job.layout.world == self.world


@dataclass(frozen=True)
class FoundLayout:
    """A layout in which a job has room, as it was simulated."""

    job: Job
    """Without what the choice recomputes and offloads."""
    keys: Mapping[str, object]
    """Of all that it takes, by their paths."""
    choice: ChoiceAsConfig

    @property
    def chosen_job(self) -> Job:
        """With what the choice recomputes."""
        return replace(self.job, recompute=self.choice.recompute)

    @property
    def fits(self) -> bool:
        """All of it: the training step, and what is beside it."""
        has_room = self.choice.peak_bytes <= self.job.budget_bytes
        return has_room and not any(lacking(self.chosen_job, self.choice.step))

    @property
    def host_node_bytes(self) -> int:
        """Of a machine's memory."""
        return host_use(self.chosen_job, self.choice.step).used_node_bytes

    @property
    def messages_ms(self) -> float:
        """Between ranks, in a step; `cost.messages`."""
        return messages_ms(self.job)

    @property
    def optimizer_ms(self) -> float:
        """That the optimizer's part on the host takes through the device and back."""
        return optimizer_ms(self.job)

    @property
    def total_ms(self) -> float:
        """By which layouts are put in order."""
        return self.choice.step_ms + beside_ms(self.job)


def optimizer_ms(job: Job) -> float:
    """That the optimizer's part on the host takes through the device and back, with both ways in use at once."""
    link = job_link(job)
    on_host = max(sizes.get("optimizer", 0) for sizes in job.resident_host_bytes)
    return on_host / min(link.out_bytes_per_ms, link.in_bytes_per_ms)


def beside_ms(job: Job) -> float:
    """What a simulated step leaves out, and layouts differ by."""
    return messages_ms(job) + optimizer_ms(job)


@dataclass(frozen=True, order=True)
class _Option:
    """A choice that may fit, by formulas."""

    total_ms: float
    job: Job = field(compare=False)
    """With what it recomputes."""
    offloads: bool = field(compare=False)


def find_layouts(task: LayoutTask, number: int) -> tuple[list[FoundLayout], tuple[str, ...]]:
    """So many bases at most, the fastest first, each in its best variant; empty where none that was tried fits. Then
    also what the fastest lacks of those that have room for training.

    Options that offload are simulated as long as there is time for it, the others till there are enough.
    """
    best: dict[object, FoundLayout] = {}
    blocked: tuple[str, ...] = ()
    spent = num_read = 0
    for option in _options(task, number):
        found = sorted(best.values(), key=_total)
        if len(found) >= number and option.total_ms > found[number - 1].total_ms:
            break
        before = best.get(base := _base_of(option.job))
        if (before and before.total_ms <= option.total_ms) or spent > _MOST_SIMULATED * (1 if option.offloads else 2):
            continue
        if (num_read := num_read + 1) > _MOST_READ:
            break
        if (job := _read(task, option)) is None:
            continue
        spent += _cost(option)
        if (each := _simulated(job, option)) is None:
            continue
        if missing := tuple(lacking(each.chosen_job, each.choice.step)):
            blocked = blocked or missing
        elif before is None or each.total_ms < before.total_ms:
            best[base] = each
    return sorted(best.values(), key=_total)[:number], () if best else blocked


def _cost(option: _Option) -> int:
    """Microbatches times layers of a simulation."""
    job = option.job
    passes = min(job.num_microbatches, 4 * job.layout.pipeline) * job.shape.num_layers
    return passes * (_COST_OF_COPIES if option.offloads else 1)


def _total(found: FoundLayout) -> float:
    return found.total_ms


def _base_of(job: Job) -> object:
    return replace(job.layout, virtual=1, num_layers_first=None, num_layers_last=None, stages=None)


def _options(task: LayoutTask, number: int) -> list[_Option]:
    """What may fit, of as many bases as can be among the best; the fastest first."""
    found: list[_Option] = []
    best: list[float] = []
    num_stages = 0
    for base in bases(task):
        if len(best) >= 2 * number and base.least_ms > heapq.nsmallest(2 * number, best)[-1]:
            break
        num_stages += base.smallest.layout.pipeline * base.smallest.layout.virtual
        if num_stages > _MOST_STAGES:
            break
        if not _can_have_room(base.smallest):
            continue
        own: list[_Option] = []
        for job in _looked_at(base):
            for option in _of_variant(job):
                num_stages += job.layout.pipeline * job.layout.virtual
                if option is not None:
                    own.append(option)
        taken = [
            option
            for offloads in (True, False)
            for option in sorted(each for each in own if each.offloads is offloads)[:_NUM_OPTIONS]
        ]
        found += taken
        best += [min(taken).total_ms] if taken else []
    return sorted(found)


def _looked_at(base: Base) -> list[Job]:
    jobs = [job for _, job in base.variants[:_NUM_VARIANTS]]
    return jobs if base.smallest in jobs else [*jobs, base.smallest]


def _can_have_room(job: Job) -> bool:
    *_, way = ways(job)
    return least_shortfall(_with_share(way, 1.0), with_copies=False) <= 0


def _with_share(job: Job, share: float) -> Job:
    return replace(job, optimizer=replace(job.optimizer, share_on_host=max(share, job.optimizer.share_on_host)))


def _of_variant(job: Job) -> Iterator[_Option | None]:
    """Choices of a job that may fit; None for each way that was looked at in vain. More recomputation than one with
    which all fits is not looked at."""
    for way in ways(job):
        stages = build_stages(way, candidates(way))
        step_ms = pipelined_ms(way, [_compute_ms(stage) for stage in stages])
        excess = [_peak_bytes(stage) - job.budget_bytes for stage in stages]
        if max(excess) <= 0:
            shared = _with_room(way, stages, 0)
            yield None if shared is None else _Option(step_ms + beside_ms(shared), shared, offloads=False)
            return
        movable = [_movable_bytes(way, stage) for stage in stages]
        here = max(stage.static_bytes["optimizer"] for stage in stages)
        found = None
        for offloads in (True, False):
            short = max(
                each + offloads * (on_their_way(stage) - moved)
                for each, moved, stage in zip(excess, movable, stages, strict=True)
            )
            shared = _with_room(way, stages, short)
            if shared is None or (offloads and not any(movable)):
                continue
            option = _Option(step_ms + beside_ms(shared), shared, offloads)
            if _host_has_room(shared, excess, here) and (found is None or option < found):
                found = option
        yield found


def _with_room(job: Job, stages: Sequence[Stage], short: int) -> Job | None:
    """The job with as much of its optimizer on the host, in quarters, as a training step that is `short` and the
    optimizer's own step ask for."""
    given, here = job.optimizer.share_on_host, max(stage.static_bytes["optimizer"] for stage in stages)
    share = given if short <= 0 else least_share(given, short, here) if here else math.inf
    while share <= 1:
        shared = _with_share(job, share)
        if _update_peak_bytes(shared, stages, given) <= job.budget_bytes:
            return shared
        share = (math.floor(4 * share) + 1) / 4
    return None


def _update_peak_bytes(job: Job, stages: Sequence[Stage], given: float) -> int:
    """Of the optimizer's step; `stages` have `given` of it on the host."""
    found = 0
    for stage in stages:
        sizes = stage.static_bytes
        names = ("weights", EIGHT_BIT_COPIES, "gradients", "runtime", "fragmentation")
        there = sum(sizes.get(name, 0) for name in names)
        left = (1 - job.optimizer.share_on_host) / (1 - given) if given < 1 else 0
        own = sum(update_bytes(job, stage.rank, stage.layers).values())
        found = max(found, there + round(left * sizes["optimizer"]) + own)
    return found


def _compute_ms(stage: Stage) -> float:
    return sum(part.forward_ms + part.backward_ms for chunk in stage.chunks for part in chunk)


def _peak_bytes(stage: Stage) -> int:
    """With nothing offloaded."""
    saved = sum(record.saved_bytes * record.live_at_peak for record in stage.records())
    return sum(stage.static_bytes.values()) + stage.kept_bytes() + saved


def _movable_bytes(job: Job, stage: Stage) -> int:
    """What can be on the host at the peak: what the link has time for in a microbatch, of all that wait there. Of a
    single one, what leaves in its forward; of several, the last has but begun to leave."""
    records = [record for record in stage.records() if record.can_offload]
    if not (size := sum(record.saved_bytes for record in records)):
        return 0
    live = sum(record.saved_bytes * record.live_at_peak for record in records) / size
    forward_ms = sum(record.forward_ms for record in stage.records())
    time_ms = forward_ms if live <= 1 else _compute_ms(stage)
    moved = min(size, _REACHED * time_ms * job_link(job).out_bytes_per_ms)
    return int(min(moved * (live if live <= 1 else live - 0.5), job.activations_host_budget_bytes))


def _host_has_room(job: Job, excess: Sequence[int], optimizer_bytes: int) -> bool:
    resident = max(sum(sizes.values()) for sizes in job.resident_host_bytes)
    left = max(excess) - optimizer_bytes * job.optimizer.share_on_host
    return resident + max(0, left) <= job.host_budget_bytes


def _read(task: LayoutTask, option: _Option) -> Job | None:
    """The job as it is configured with an option's layout; None where `check` refuses that, or keys have no effect."""
    job = task.reread(job_keys(option.job))
    return job if job is not None and job.layout == option.job.layout else None


def _simulated(job: Job, option: _Option) -> FoundLayout | None:
    """None where training does not fit after all."""
    choice = _choice(job, option)
    if choice is None or choice.order(job)[:2] != (0, 0):
        return None
    keys = {**job_keys(option.job), **dict(paths_of(planned_keys(job, choice), SECTION))}
    return FoundLayout(job, keys, choice)


def _choice(job: Job, option: _Option) -> ChoiceAsConfig | None:
    way = replace(job, recompute=option.job.recompute)
    trials = Trials(replace(job, recompute=Recompute()))
    if not option.offloads:
        return trials.try_modules(way.recompute, ())
    lists = [names for modules in by_bytes(way) if (names := listable(way, modules)) and may_fit(way, names)]
    found = None
    for names in dict.fromkeys([*lists[:1], *lists[-1:]]):
        found = trials.try_modules(way.recompute, names)
        if found.order(job)[:2] == (0, 0):
            break
    return found
