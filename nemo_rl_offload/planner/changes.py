"""Changes of a job that would make it fit, for a budget that no choice of modules meets."""

from collections.abc import Iterator
from dataclasses import replace

from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.planner.choose import Budget
from nemo_rl_offload.planner.job import Job, Recompute
from nemo_rl_offload.planner.layout import check_layout
from nemo_rl_offload.planner.stages import Stage, build_stages, candidates

LOGPROB_CHUNKS = 8
"""A microbatch's logits in float32 are proposed in so many pieces; more save little, for logits in bfloat16 stay."""


def stage_budget(job: Job, stage: Stage, less_bytes: int = 0) -> Budget:
    """What the chooser may use on a stage."""
    fixed = sum(stage.static_bytes.values()) + stage.kept_bytes()
    return Budget(job.budget_bytes - less_bytes, fixed, job.host_budget_bytes)


def on_their_way(stage: Stage) -> int:
    """A first guess of what copies hold at the peak: the two largest groups."""
    return sum(sorted(record.saved_bytes for record in stage.records())[-2:])


def least_shortfall(job: Job) -> int:
    """How far every choice stays above the budget, over all stages: what cannot go, or has no room on the host."""
    shortfall = 0
    for stage in build_stages(job, candidates(job)):
        budget = stage_budget(job, stage)
        moved = kept = 0
        for record in stage.records():
            live_bytes = record.saved_bytes * record.live_at_peak
            if record.recompute_ms is None and record.can_offload:
                moved += live_bytes
            elif record.recompute_ms is None:
                kept += live_bytes
        homeless = max(0, moved - job.host_budget_bytes)
        peak = budget.fixed_bytes + kept + homeless + on_their_way(stage)
        shortfall = max(shortfall, peak - budget.peak_bytes)
    return shortfall


def fitting_changes(job: Job) -> tuple[str, ...]:
    """Single changes that fit; else pairs of full recomputation and another; else how near the best of them comes."""
    singles = list(_single(job))
    fitting = [text for text, changed in singles if least_shortfall(changed) == 0]
    if fitting:
        return tuple(fitting)
    full = _full_recomputation(job)
    pairs = [(f"recompute_granularity=full and {text}", changed) for text, changed in _single(full)]
    shortfalls = [(least_shortfall(changed), text) for text, changed in pairs]
    fitting = [text for shortfall, text in shortfalls if shortfall == 0]
    if fitting:
        return tuple(fitting)
    if not shortfalls:
        return ("none that was tried",)
    shortfall, text = min(shortfalls)
    return (f"none that was tried; {text} comes nearest, {shortfall / 2**30:.1f} GiB short",)


def _full_recomputation(job: Job) -> Job:
    return replace(job, recompute=Recompute(method="uniform"))


def _single(job: Job) -> Iterator[tuple[str, Job]]:
    chunk = job.sequence // LOGPROB_CHUNKS
    if job.logprob_chunk_size is None and chunk:
        yield f"logprob_chunk_size={chunk}", replace(job, logprob_chunk_size=chunk)
    if not job.optimizer.distributed and job.layout.data > 1:
        yield "use_distributed_optimizer=true", replace(job, optimizer=replace(job.optimizer, distributed=True))
    if job.recompute.method is None:
        yield "recompute_granularity=full (uniform, 1 layer)", _full_recomputation(job)
    if job.micro_batch > job.rows_per_sample:
        half = job.micro_batch // job.rows_per_sample // 2
        rows = half * job.rows_per_sample
        batches = job.num_microbatches * job.micro_batch // rows
        yield f"train_micro_batch_size={half}", replace(job, micro_batch=rows, num_microbatches=batches)
    for sequence in (job.sequence // 2, job.sequence // 4):
        if _is_sound(changed := replace(job, sequence=sequence)):
            yield f"max_total_sequence_length={sequence}", changed
    yield from _layouts(job)


def _layouts(job: Job) -> Iterator[tuple[str, Job]]:
    layout = job.layout
    batch = job.num_microbatches * job.micro_batch * layout.data
    for factor in (2, 4):
        changes = {
            f"tensor_model_parallel_size={layout.tensor * factor} with sequence_parallel=true": replace(
                layout, tensor=layout.tensor * factor, sequence_parallel=True
            ),
            f"pipeline_model_parallel_size={layout.pipeline * factor}": replace(
                layout, pipeline=layout.pipeline * factor
            ),
            f"expert_model_parallel_size={layout.expert * factor}": replace(layout, expert=layout.expert * factor),
            f"context_parallel_size={layout.context * factor}": replace(layout, context=layout.context * factor),
        }
        for text, changed in changes.items():
            per_pass = job.micro_batch * changed.data
            if per_pass == 0 or batch % per_pass:
                continue
            candidate = replace(job, layout=changed, num_microbatches=batch // per_pass)
            if _is_sound(candidate):
                yield text, candidate


def _is_sound(job: Job) -> bool:
    try:
        check_layout(job.layout, job.shape, job.sequence)
    except ConfigError:
        return False
    return job.sequence > 0 and (job.layout.virtual == 1 or job.num_microbatches % job.layout.pipeline == 0)
