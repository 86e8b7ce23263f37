"""What to say when a training step finds no device memory: the peak, the largest module, and the planner's way out."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from nemo_rl_offload.config.schema import PolicyConfig
from nemo_rl_offload.config.sizes import parse_bytes
from nemo_rl_offload.errors import ConfigError, ResourceError
from nemo_rl_offload.planner.catalogue import load_model_shape
from nemo_rl_offload.planner.changes import least_shortfall, smaller_microbatches
from nemo_rl_offload.planner.hardware import recognise
from nemo_rl_offload.planner.job import Job, Recompute, read_job
from nemo_rl_offload.planner.memory import allowance_bytes
from nemo_rl_offload.planner.outcome import highest_peak, module_rows, run_configured
from nemo_rl_offload.planner.plan import JobPlan, make_plan
from nemo_rl_offload.planner.search import fullest_stage

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
        lines += _proposals(job, policy["megatron_cfg"])
    except ConfigError as error:  # what the planner does not know
        lines.append(f"Offload more modules, or use smaller microbatches ({error}).")
    return ResourceError(" ".join(lines))


def _proposals(job: Job, cfg: Mapping[str, Any]) -> Iterator[str]:
    present = highest_peak(run_configured(job))
    if cfg["offload_modules"] == "auto" and cfg["fine_grained_activation_offloading"]:
        allowances = sum(allowance_bytes(job.device).values())
        present = min(present, parse_bytes(cfg["activation_offload"]["gpu_memory_budget"]) + allowances)
    plan = make_plan(replace(job, memory_bytes=int(min(job.device.memory_bytes, MARGIN * present))))
    rows = module_rows(plan.baseline, fullest_stage(plan.baseline))
    rows = [row for row in rows if row.module not in job.offload_modules]
    if rows:
        largest = max(rows, key=lambda row: row.live_bytes)
        yield (
            f"Most of what stays there for the backward pass is {largest.module}'s: {largest.live_bytes / GIB:.2f} GiB "
            "by the planner's formulas."
        )
    yield f"To need a tenth less: {' or '.join(_changes(plan, job, cfg))}."


def _changes(plan: JobPlan, job: Job, cfg: Mapping[str, Any]) -> Iterator[str]:
    smaller = dict(smaller_microbatches(plan.job))
    if plan.shortfall_bytes:
        fitting = next((text for text, changed in smaller.items() if least_shortfall(changed) == 0), None)
        others = [change for change in plan.changes if change not in smaller]
        yield from [fitting, *others[:2]] if fitting else others[:3]
        return
    if planned := list(_differing(plan.keys, cfg)):
        yield _enumerated(planned)
    if smaller:
        yield next(iter(smaller))
    elif job.recompute.method is None and not job.expert_buffers.has_stash:
        yield _enumerated(list(_differing(Recompute(method="uniform").keys, cfg)))


_NOTHING: tuple[Any, ...] = ([], None)


def _differing(keys: Mapping[str, Any], cfg: Mapping[str, Any], section: str = "") -> Iterator[str]:
    """Overrides for what is otherwise in force."""
    for key, value in keys.items():
        if isinstance(value, Mapping):
            yield from _differing(value, cfg[key], f"{key}.")
        elif value != cfg[key] and not (value in _NOTHING and cfg[key] in _NOTHING):
            yield f"{section}{key}={_value(value)}"


def _value(value: Any) -> str:
    if isinstance(value, list):
        return f"[{','.join(value)}]"
    return {None: "null", True: "true", False: "false"}.get(value, str(value))


def _enumerated(words: Sequence[str]) -> str:
    return " and ".join([*([", ".join(words[:-1])] if words[:-1] else []), *words[-1:]])
