"""Changes of a job that would make it fit, for a budget that no choice of modules meets."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.offload.solver import MemoryBudget
from nemo_rl_offload.planner.job import Job
from nemo_rl_offload.planner.phases import least_share
from nemo_rl_offload.planner.search.candidates import candidates
from nemo_rl_offload.planner.simulate.stages import Stage, build_stages
from nemo_rl_offload.specs.parallel_layout import check_layout
from nemo_rl_offload.units import gib

_POLICY, _CFG = "policy", "policy.megatron_cfg"
FUSED = f"{_CFG}.use_fused_linear_logprobs=true"
"""Makes no logits."""
NONE_TRIED = "none that was tried"
LOGPROB_CHUNKS = 8
"""A microbatch's logits in float32 are proposed in so many pieces; more save little, for logits in bfloat16 stay."""


def stage_budget(job: Job, stage: Stage, less_bytes: int = 0) -> MemoryBudget:
    """What the chooser may use on a stage."""
    fixed = sum(stage.static_bytes.values()) + stage.kept_bytes()
    return MemoryBudget(job.budget_bytes - less_bytes, fixed, job.activations_host_budget_bytes)


def on_their_way(stage: Stage) -> int:
    """A first guess of what copies hold at the peak: the two largest groups."""
    return sum(sorted(record.saved_bytes for record in stage.records())[-2:])


def least_shortfall(job: Job, with_copies: bool = True) -> int:
    """How far every choice stays above the budget, over all stages: what cannot go or has no room on the host, and
    what copies may hold."""
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
        homeless = max(0, moved - job.activations_host_budget_bytes)
        peak = budget.fixed_bytes + kept + homeless + (on_their_way(stage) if with_copies else 0)
        shortfall = max(shortfall, peak - budget.peak_bytes)
    return shortfall


def suggest(
    job: Job,
    fits: Callable[[Job], bool],
    surely_lacks: Callable[[Job], int],
    shortfall: Callable[[Job], int],
    update_lacks: Callable[[Job], int],
    others_lack: Callable[[Job], Sequence[str]],
) -> tuple[str, ...]:
    """Single changes with which a plan fits, as overrides; else how near the best of them comes.

    `shortfall` says what the plan of a job lacks. Sooner than that, `fits` says where it lacks nothing, if not always,
    and `surely_lacks` what it lacks at least. `update_lacks` is what the optimizer's step lacks, and `others_lack` what
    is missing beside both.
    """
    singles = list(_single(job, update_lacks))
    if not singles:
        return (NONE_TRIED,)
    if fitting := [single for single in singles if fits(single[1])]:
        return _that_would_do(fitting, others_lack)
    least = sorted((surely_lacks(changed), number) for number, (_, changed) in enumerate(singles))
    near = [number for lacking, number in least if lacking == 0] or [least[0][1]]
    lacking = {number: shortfall(singles[number][1]) for number in near}
    if fitting := [singles[number] for number in sorted(near) if not lacking[number]]:
        return _that_would_do(fitting, others_lack)
    nearest = min(near, key=lambda number: lacking[number])
    return (f"{NONE_TRIED}; {singles[nearest][0]} comes nearest, {gib(lacking[nearest])} short",)


def _that_would_do(fitting: Sequence[tuple[str, Job]], others_lack: Callable[[Job], Sequence[str]]) -> tuple[str, ...]:
    """Of changes with which training fits those with which all does; else the first, and what it leaves."""
    if whole := tuple(text for text, changed in fitting if not others_lack(changed)):
        return whole
    text, changed = fitting[0]
    left = " ".join(others_lack(changed))
    return (f"{NONE_TRIED}; with {text} training and the optimizer's step would fit, and there is left: {left}",)


def _single(job: Job, update_lacks: Callable[[Job], int]) -> Iterator[tuple[str, Job]]:
    chunk = job.sequence // LOGPROB_CHUNKS
    if job.makes_logits:
        yield FUSED, replace(job, makes_logits=False)
    if job.makes_logits and job.logprob_chunk_size is None and chunk:
        yield f"{_POLICY}.logprob_chunk_size={chunk}", replace(job, logprob_chunk_size=chunk)
    if not job.optimizer.distributed and job.layout.data > 1:
        changed = replace(job, optimizer=replace(job.optimizer, distributed=True))
        yield f"{_CFG}.optimizer.use_distributed_optimizer=true", changed
    yield from _optimizer_on_host(job, update_lacks)
    yield from islice(smaller_microbatches(job), 2)
    yield from _layouts(job)


def _optimizer_on_host(job: Job, update_lacks: Callable[[Job], int]) -> Iterator[tuple[str, Job]]:
    """With as much of the optimizer's state on the host as every choice and its own step lack, in quarters."""
    given = job.optimizer.share_on_host
    here_bytes = max(stage.static_bytes["optimizer"] for stage in build_stages(job, ()))
    if given == 1 or not here_bytes:
        return
    share = min(1.0, least_share(given, least_shortfall(job), here_bytes))
    shares = [quarters / 4 for quarters in range(math.ceil(4 * share), 5)]
    jobs = [replace(job, optimizer=replace(job.optimizer, share_on_host=each)) for each in shares]
    changed = next((each for each in jobs if not update_lacks(each)), jobs[0])
    if max(sum(sizes.values()) for sizes in changed.resident_host_bytes) <= job.host_budget_bytes:
        key, given = f"{_CFG}.optimizer.optimizer_cpu_offload=true", changed.optimizer.share_on_host
        yield f"{key} {_CFG}.optimizer.optimizer_offload_fraction={given:g}", changed


def smaller_microbatches(job: Job) -> Iterator[tuple[str, Job]]:
    """The job in microbatches of half the size, of a quarter, and so on: as far as they divide the batch, or hold the
    longest sample."""
    found = _fewer_samples(job) if job.micro_batch_tokens is None else _fewer_tokens(job, job.micro_batch_tokens)
    return ((text, smaller) for text, smaller in found if _is_sound(smaller))


def _fewer_samples(job: Job) -> Iterator[tuple[str, Job]]:
    samples = job.micro_batch // job.rows_per_sample
    total = samples * job.num_microbatches
    while samples > 1:
        samples = next(size for size in range(samples // 2, 0, -1) if total % size == 0)
        smaller = replace(job, micro_batch=samples * job.rows_per_sample, num_microbatches=total // samples)
        yield f"{_POLICY}.train_micro_batch_size={samples}", smaller


def _fewer_tokens(job: Job, tokens: int) -> Iterator[tuple[str, Job]]:
    total = tokens * job.num_microbatches
    while (tokens := tokens // 2) >= job.sequence * job.rows_per_sample:
        number = math.ceil(total / tokens)
        smaller = replace(job, micro_batch_tokens=tokens, micro_batch=tokens // job.sequence, num_microbatches=number)
        yield f"{_tokens_key(job)}={tokens}", smaller


def _tokens_key(job: Job) -> str:
    return f"{_POLICY}.{'sequence_packing' if job.is_packed else 'dynamic_batching'}.train_mb_tokens"


def _layouts(job: Job) -> Iterator[tuple[str, Job]]:
    layout = job.layout
    batch = job.num_microbatches * layout.data
    for factor in (2, 4):
        changes = {
            f"{_CFG}.tensor_model_parallel_size={layout.tensor * factor} {_CFG}.sequence_parallel=true": replace(
                layout, tensor=layout.tensor * factor, sequence_parallel=True
            ),
            f"{_CFG}.pipeline_model_parallel_size={layout.pipeline * factor}": replace(
                layout, pipeline=layout.pipeline * factor
            ),
            f"{_CFG}.expert_model_parallel_size={layout.expert * factor}": replace(
                layout, expert=layout.expert * factor
            ),
        }
        has_form = job.shape.attention_sinks or job.shape.sliding_windows
        if not (job.is_packed and job.transformer_engine and has_form):  # which has no kernel for it
            longer = layout.context * factor
            changes[f"{_CFG}.context_parallel_size={longer}"] = replace(layout, context=longer)
        for text, changed in changes.items():
            if changed.data == 0 or batch % changed.data:
                continue
            candidate = replace(job, layout=changed, num_microbatches=batch // changed.data)
            if _is_sound(candidate):
                yield text, candidate


def _is_sound(job: Job) -> bool:
    try:
        check_layout(job.layout, job.shape, job.sequence)
    except ConfigError:
        return False
    return job.sequence > 0 and (job.layout.virtual == 1 or job.num_microbatches % job.layout.pipeline == 0)
