"""Layouts that a job's ranks, model and batch allow, and what they take at least, without a simulation.

A *base* says how many ranks share what; its variants are virtual stages, how uneven layers are divided, and sizes of
microbatches. Tensor-parallel ranks are of one machine, with sequence parallelism. Rows, batch and model stay what they
are: nothing here changes what is trained.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.planner.cost.flops import layer_costs
from nemo_rl_offload.planner.cost.memory import allowance_bytes, stage_adapters, stage_parameters, state_bytes
from nemo_rl_offload.planner.cost.messages import messages_ms
from nemo_rl_offload.planner.cost.storages import LayerContext
from nemo_rl_offload.planner.job import Job, Recompute, cut_batch
from nemo_rl_offload.planner.simulate.stages import output_layer_ms
from nemo_rl_offload.specs.devices import Device
from nemo_rl_offload.specs.model_shape import LayerKind
from nemo_rl_offload.specs.parallel_layout import (
    Division,
    ParallelLayout,
    check_layout,
    divisions,
    stage_layers,
)

_LEAST_ROW = 1024
"""Tokens of a row that each context-parallel rank has at least."""
_MOST_CHUNKS = 8
"""Virtual stages of a rank."""
_UNEVEN_CHUNKS = (1, 2, 4)
"""Likewise, where they cannot be equal."""


@dataclass(frozen=True)
class LayoutTask:
    """What layouts are searched for."""

    job: Job
    """On any layout of its ranks; what it recomputes does not count."""
    longest: int
    """Tokens of the longest row, before it is padded."""
    global_batch: int
    """Samples of a step."""
    samples: int
    """Of a microbatch, as configured: no more are tried."""
    tokens: int | None
    """Likewise, where microbatches are numbers of tokens."""
    reread: Callable[[Mapping[str, object]], Job | None]
    """The configured job with these keys; None where `check` refuses them."""


@dataclass(frozen=True)
class Base:
    """A layout's variants with their estimated times of a step in milliseconds, the fastest first; of equals the one
    with the fewest virtual stages, then that with the largest microbatches."""

    variants: tuple[tuple[float, Job], ...]

    @property
    def least_ms(self) -> float:
        return self.variants[0][0]

    @property
    def smallest(self) -> Job:
        """The variant that takes the least memory."""
        return min(self.variants, key=lambda each: (each[1].context.tokens.count, each[1].layout.virtual, each[0]))[1]


def bases(task: LayoutTask) -> list[Base]:
    """Those whose weights and gradients have room; the fastest first."""
    found = []
    for layout in _layouts(task.job):
        even = next((each for each in _variants(task, layout, 1)), None)
        if even is not None and least_state_bytes(even) <= task.job.budget_bytes:
            jobs = [each for virtual in _virtual_sizes(task.job, layout) for each in _variants(task, layout, virtual)]
            timed = [(estimated_ms(each), each) for each in jobs]
            found.append(Base(tuple(sorted(timed, key=_order))))
    return sorted(found, key=lambda each: each.least_ms)


def _order(timed: tuple[float, Job]) -> tuple[float, int, int]:
    ms, job = timed
    return round(ms, 3), job.layout.virtual, -job.context.tokens.count


def _virtual_sizes(job: Job, layout: ParallelLayout) -> Sequence[int]:
    """Those that divide the layers; where none does, some for which stages are written."""
    if layout.pipeline == 1:
        return [1]
    share, rest = divmod(job.shape.num_layers, layout.pipeline)
    sizes = [each for each in range(1, _MOST_CHUNKS + 1) if not rest and share % each == 0]
    return sizes if len(sizes) > 1 else _UNEVEN_CHUNKS


def _variants(task: LayoutTask, layout: ParallelLayout, virtual: int) -> Iterator[Job]:
    """As even as can be first."""
    chunked = replace(layout, virtual=virtual)
    for division in reversed(_divisions(task.job, chunked)):
        yield from _cut(task, replace(chunked, **division._asdict()))


def _layouts(job: Job) -> Iterator[ParallelLayout]:
    world, shape = job.layout.world, job.shape
    num_experts = shape.experts.num_experts if shape.experts else 1
    can_divide_each = shape.experts is not None and job.adapters is None
    for tensor in _divisors(math.gcd(job.node_ranks, world)):
        for context in _divisors(world // tensor):
            if context > 1 and context * _LEAST_ROW > job.sequence:
                break
            for pipeline in _divisors(world // tensor // context):
                if pipeline > shape.num_layers:
                    break
                stage_ranks = world // pipeline
                for expert in _divisors(math.gcd(num_experts, stage_ranks)):
                    # Where whole experts can be divided among as many ranks, that takes less time and memory.
                    may_divide_each = can_divide_each and tensor > 1 and num_experts % (expert * tensor) > 0
                    for expert_tensor in (1, tensor) if may_divide_each else (1,):
                        if stage_ranks % (expert * expert_tensor) == 0:
                            yield ParallelLayout(
                                world, tensor, pipeline, 1, context, expert, expert_tensor, sequence_parallel=tensor > 1
                            )


@lru_cache(maxsize=512)
def _divisors(number: int) -> tuple[int, ...]:
    return tuple(each for each in range(1, number + 1) if number % each == 0)


def _divisions(job: Job, layout: ParallelLayout) -> Sequence[Division]:
    if layout.pipeline == 1:
        return [Division()]
    if job.teacher is not None and job.teacher.num_layers % layout.pipeline:
        return []
    return divisions(job.shape.num_layers, layout.pipeline, layout.virtual, job.shape.num_mtp_layers)


def _cut(task: LayoutTask, layout: ParallelLayout) -> Iterator[Job]:
    """The job on a layout, in microbatches of the configured size and of less; nothing where they do not divide."""
    job = task.job
    if task.global_batch % layout.data:
        return
    sequence = layout.padded(task.longest, job.numbers.fp8)
    try:
        for shape in (job.shape, job.teacher):
            if shape is job.shape:
                check_layout(layout, shape, sequence)
            elif shape is not None:
                check_layout(replace(layout, virtual=1, **Division()._asdict()), shape, sequence)
    except ConfigError:
        return
    rows = job.rows_per_sample
    sizes: Iterator[tuple[int, int | None]] = ((samples, None) for samples in _halves(task.samples, 1))
    if task.tokens is not None:
        sizes = ((task.samples, tokens) for tokens in _halves(task.tokens, sequence * rows))
    for samples, tokens in sizes:
        try:
            cut = cut_batch(task.global_batch, sequence, layout, rows, samples=samples, tokens=tokens)
        except ConfigError:
            continue
        yield replace(
            job,
            layout=layout,
            sequence=sequence,
            recompute=Recompute(),
            micro_batch=cut.num_rows,
            num_microbatches=cut.number,
            micro_batch_tokens=cut.num_tokens,
        )


def _halves(most: int, least: int) -> Iterator[int]:
    """The number itself, and halves of it, down to `least`, which is the last."""
    while most > least:
        yield most
        most //= 2
    yield max(most, least)


def least_state_bytes(job: Job) -> int:
    """Of the fullest stage: weights, gradients and what is never free, with all of the optimizer elsewhere."""
    found = 0
    for rank, chunks in enumerate(stage_layers(job.layout, job.shape.num_layers)):
        parameters = stage_parameters(job.shape, job.layout, chunks, rank)
        adapters = None
        if job.adapters is not None:
            adapters = stage_adapters(job.shape, job.layout, chunks, rank, job.adapters)
        sizes = state_bytes(parameters, job.layout, job.optimizer, job.numbers.element_bytes, adapters)
        found = max(found, sizes["weights"] + sizes["gradients"])
    return found + sum(allowance_bytes(job.device).values())


def estimated_ms(job: Job) -> float:
    """A step without recomputation and copies: the busiest stage's microbatches, and the others' first and last."""
    return pipelined_ms(job, stages_ms(job)) + messages_ms(job)


def pipelined_ms(job: Job, stages: Sequence[float]) -> float:
    """A step whose stages compute so long for a microbatch, forward and backward."""
    return job.num_microbatches * max(stages) + (sum(stages) - max(stages)) / job.layout.virtual


def stages_ms(job: Job) -> list[float]:
    """Compute of a microbatch on each stage."""
    kinds, is_frozen = job.shape.all_kinds, job.adapters is not None
    by_kind = {kind: _layer_ms(job.context, job.device, kind, is_frozen) for kind in set(kinds)}
    found = [
        sum(by_kind[kinds[layer]] for chunk in chunks for layer in chunk)
        for chunks in stage_layers(job.layout, job.shape.num_layers)
    ]
    found[-1] += sum(output_layer_ms(job)) + sum(by_kind[kind] for kind in kinds[job.shape.num_layers :])
    return found


@lru_cache(maxsize=4096)
def _layer_ms(context: LayerContext, device: Device, kind: LayerKind, is_frozen: bool) -> float:
    fp8 = context.numbers.fp8 is not None
    return sum(
        work.forward_ms(device, fp8) + work.backward_ms(device, fp8, is_frozen=is_frozen)
        for work in layer_costs(context, kind)
    )
