"""What to say when a training step finds no device memory: the peak, the largest module, and the planner's way out."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from nemo_rl_offload.config.schema import PolicyConfig
from nemo_rl_offload.errors import ConfigError, ResourceError
from nemo_rl_offload.planner.catalogue import load_model_shape
from nemo_rl_offload.planner.changes import least_shortfall, smaller_microbatches
from nemo_rl_offload.planner.hardware import recognise
from nemo_rl_offload.planner.job import Job, read_job
from nemo_rl_offload.planner.outcome import highest_peak, module_rows, run_listed_modules
from nemo_rl_offload.planner.plan import JobPlan, make_plan
from nemo_rl_offload.planner.recompute import RECOMPUTE_KEYS

GIB = 1 << 30
MARGIN = 0.9
"""The plan to propose takes at most this share of what the failed one was predicted to take."""


def out_of_memory(
    policy: PolicyConfig,
    model_path: Path,
    world_size: int,
    device_name: str,
    total_bytes: int,
    peak_bytes: int,
    rows_per_sample: int = 1,
) -> ResourceError:
    """The error for a device of this name (the driver's) and memory, of which torch held `peak_bytes` at most, in a
    step whose loss function takes so many rows for a sample."""
    lines = [
        f"out of device memory in a training step: torch held up to {peak_bytes / GIB:.1f} GiB of the "
        f"{total_bytes / GIB:.1f} GiB of this {device_name}."
    ]
    try:
        device = replace(recognise(device_name, total_bytes), memory_gib=total_bytes / GIB)
        shape = load_model_shape(policy["model_name"], model_path)
        job = read_job(policy, shape, device, world_size, rows_per_sample=rows_per_sample)
        lines += _proposals(job)
    except ConfigError as error:  # what the planner does not know
        lines.append(f"Offload more modules, or use smaller microbatches ({error}).")
    return ResourceError(" ".join(lines))


def _proposals(job: Job) -> Iterator[str]:
    present = highest_peak(run_listed_modules(job, job.offload_modules))
    plan = make_plan(replace(job, memory_bytes=int(min(job.device.memory_bytes, MARGIN * present))))
    rank = max(range(len(plan.baseline.stages)), key=plan.baseline.peak_bytes)
    rows = [row for row in module_rows(plan.baseline, rank) if row.module not in job.offload_modules]
    if rows:
        largest = max(rows, key=lambda row: row.live_bytes)
        yield (
            f"Most of what stays there for the backward pass is {largest.module}'s: {largest.live_bytes / GIB:.2f} GiB "
            "by the planner's formulas."
        )
    yield f"To need a tenth less: {' or '.join(_changes(plan, job))}."


def _changes(plan: JobPlan, job: Job) -> Iterator[str]:
    smaller = dict(smaller_microbatches(plan.job))
    if plan.shortfall_bytes:
        fitting = next((text for text, changed in smaller.items() if least_shortfall(changed) == 0), None)
        others = [change for change in plan.changes if change not in smaller]
        yield from [fitting, *others[:2]] if fitting else others[:3]
        return
    keys = plan.keys
    changed = [f"{key}={_value(keys[key])}" for key in RECOMPUTE_KEYS if keys.get(key) is not None]
    if "activation_offload" in keys:
        budget = keys["activation_offload"]["gpu_memory_budget"]
        changed = ["offload_modules=auto", f"activation_offload.gpu_memory_budget={budget}", *changed]
    elif set(plan.written.offload_modules) != set(job.offload_modules):
        changed.insert(0, f"offload_modules={_value(keys['offload_modules'])}")
    if changed:
        yield " with ".join(
            ["fine_grained_activation_offloading=true", *changed] if keys["offload_modules"] else changed
        )
    yield next(iter(smaller), "recompute_granularity=full")


def _value(value: Any) -> str:
    return f"[{','.join(value)}]" if isinstance(value, list) else str(value)
