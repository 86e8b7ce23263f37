"""What to say when there is no device memory left: the peak and what to change. For a training step, which the planner
knows, the largest module or the logits, and the planner's way out as well."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from nemo_rl_offload.config.rules.rule import MEGATRON
from nemo_rl_offload.config.schema import PolicyConfig
from nemo_rl_offload.errors import ConfigError, ResourceError
from nemo_rl_offload.planner.cost.memory import allowance_bytes
from nemo_rl_offload.planner.job import Job, Recompute, read_job
from nemo_rl_offload.planner.phases import UPDATE, lacking
from nemo_rl_offload.planner.plan import JobPlan, make_plan
from nemo_rl_offload.planner.search.choice import fullest_stage, surely_fits
from nemo_rl_offload.planner.search.suggestions import FUSED, smaller_microbatches
from nemo_rl_offload.planner.simulate.simulated_step import highest_peak, module_rows, run_configured
from nemo_rl_offload.specs.allocator import EXPANDABLE, allocator_settings, expands
from nemo_rl_offload.specs.catalogue import load_model_shape
from nemo_rl_offload.specs.devices import recognise
from nemo_rl_offload.specs.out_of_memory import is_out_of_memory, out_of_memory_error
from nemo_rl_offload.units import GIB, gib, parse_bytes

MARGIN = 0.9
"""The plan to propose takes at most this share of what the failed one was predicted to take; of what no plan changes,
all."""

NUM_CHANGES = 3
"""That are proposed."""

Phase = Literal[
    "loading the model",
    "evaluating",
    "computing log-probabilities",
    "generating",
    "handing over weights",
    "bringing back what training needs",
    "writing or reading a checkpoint",
]
"""What a worker does beside training steps."""
CHECKPOINTING: Phase = "writing or reading a checkpoint"


WORTH_SAYING = 0.05
"""Of the device: less that lies unused, or is others', is not told."""
LONGEST_LINE = 300
"""Characters of what a library said."""


@dataclass(frozen=True)
class DeviceUse:
    """A device by the driver's name, its memory, and the most of it that torch's tensors took."""

    name: str
    total_bytes: int
    peak_bytes: int
    unused_bytes: int = 0
    """What torch's allocator had beside tensors when there was no room: gaps, for it had freed the rest."""
    others_bytes: int = 0
    """What was in use beside that: other processes, and libraries of this one."""
    refused: str = ""
    """What a library said that found no room beside torch's allocator; empty where that one found none."""

    def __str__(self) -> str:
        if not self.total_bytes:
            return "the device has no room for this process at all. See with nvidia-smi what else is on it."
        held = gib(self.peak_bytes, decimals=1 if self.peak_bytes >= GIB else 3)
        said = [f"torch held up to {held} of the {gib(self.total_bytes)} of this {self.name}."]
        if self.others_bytes > WORTH_SAYING * self.total_bytes:
            said.append(f"Others had {gib(self.others_bytes)}.")
        if self.refused:
            cached = f", while {gib(self.unused_bytes)} lay in torch's cache" if self._has_unused else ""
            said.append(f"It was a library that found no room{cached}: {self.refused}")
        elif self.is_fragmented:
            said.append(f"{gib(self.unused_bytes)} lay unused between tensors.")
        return " ".join(said)

    @property
    def _has_unused(self) -> bool:
        return self.unused_bytes > WORTH_SAYING * self.total_bytes

    @property
    def is_fragmented(self) -> bool:
        """Whether much lies unused between tensors, and torch was not told to avoid that."""
        return not self.refused and self._has_unused and not expands(allocator_settings()[1])


def device_use(error: BaseException) -> DeviceUse:
    """Of this process's device when an error said that it has no room; of one without room for this process, nothing is
    known."""
    import torch

    try:
        name, (free_bytes, total_bytes) = torch.cuda.get_device_name(), torch.cuda.mem_get_info()
        reserved_bytes = torch.cuda.memory_reserved()
        return DeviceUse(
            name,
            total_bytes,
            torch.cuda.max_memory_allocated(),
            unused_bytes=reserved_bytes - torch.cuda.memory_allocated(),
            others_bytes=max(0, total_bytes - free_bytes - reserved_bytes),
            refused=_refused(error),
        )
    except RuntimeError:
        return DeviceUse("", 0, 0)


def _refused(error: BaseException) -> str:
    """The line by which a library says so; empty where torch's allocator found no room."""
    import torch

    found = out_of_memory_error(error)
    if found is None or isinstance(found, torch.OutOfMemoryError):
        return ""
    lines = [line.strip() for line in str(found).splitlines()]
    return next(line for line in lines if is_out_of_memory(RuntimeError(line)))[:LONGEST_LINE].rstrip(".") + "."


@contextmanager
def explained(phase: Phase, policy: PolicyConfig) -> Iterator[None]:
    """Raise ResourceError, which says what to change, where this phase finds no device memory."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise out_of_memory_while(phase, policy, device_use(error)) from error


def out_of_memory(
    policy: PolicyConfig, model_path: Path, world_size: int, use: DeviceUse, rows_per_sample: int = 1
) -> ResourceError:
    """The error for a training step whose loss function takes so many rows for a sample."""
    lines = [f"out of device memory in a training step: {use}", *_less_between(policy, use)]
    try:
        device = replace(recognise(use.name, use.total_bytes), memory_gib=use.total_bytes / GIB)
        shape = load_model_shape(policy["model_name"], model_path, policy["megatron_cfg"]["mtp_num_layers"])
        job = read_job(policy, shape, device, world_size, rows_per_sample=rows_per_sample)
        lines += _proposals(job, policy["megatron_cfg"])
    except ConfigError as error:  # what the planner does not know
        lines.append(f"Offload more modules, or use smaller microbatches ({error}).")
    return ResourceError(" ".join(lines))


def out_of_memory_while(phase: Phase, policy: PolicyConfig, use: DeviceUse) -> ResourceError:
    """The error for anything but a training step: what makes it smaller, with the values in force."""
    if phase in ("loading the model", "handing over weights", "bringing back what training needs", CHECKPOINTING):
        ways = [f"tensor_model_parallel_size or pipeline_model_parallel_size in {MEGATRON} divide it among more GPUs"]
        if not policy["megatron_cfg"]["optimizer"]["use_distributed_optimizer"]:
            ways.append("optimizer.use_distributed_optimizer there divides the optimizer's state")
    else:
        ways = list(_smaller(phase, policy)) or [f"{MEGATRON}.tensor_model_parallel_size divides it among more GPUs"]
    said = " ".join([str(use), *_less_between(policy, use)])
    return ResourceError(f"out of device memory while {phase}: {said} What needs less: {'; '.join(ways)}.")


def _less_between(policy: PolicyConfig, use: DeviceUse) -> Iterator[str]:
    """The key for less memory between tensors, beside what it holds already."""
    if use.is_fragmented:
        name, there = allocator_settings()
        value = ",".join(filter(None, [there, EXPANDABLE]))
        entry = f"{MEGATRON}.env_vars: {name}: {value}"
        if not there and not policy["megatron_cfg"]["env_vars"]:
            entry = f"'{MEGATRON}.env_vars={{{name}:{value}}}'"
        yield f"Less may lie there with {entry}."


def _smaller(phase: Phase, policy: PolicyConfig) -> Iterator[str]:
    if phase == "generating":
        yield from _lower("generation_batch_size", policy["generation_batch_size"])
        return
    is_evaluation = phase == "evaluating"
    if policy["sequence_packing"]["enabled"] or policy["dynamic_batching"]["enabled"]:
        name: Literal["sequence_packing", "dynamic_batching"]
        name = "sequence_packing" if policy["sequence_packing"]["enabled"] else "dynamic_batching"
        key: Literal["train_mb_tokens", "logprob_mb_tokens"] = (
            "train_mb_tokens" if is_evaluation else "logprob_mb_tokens"
        )
        yield f"a lower policy.{name}.{key} (it is {policy[name][key]}), where the longest sample takes less"
    elif is_evaluation:
        yield from _lower("train_micro_batch_size", policy["train_micro_batch_size"])
    else:
        yield from _lower("logprob_batch_size", policy["logprob_batch_size"])
    if not policy["megatron_cfg"]["use_fused_linear_logprobs"]:
        yield f"{MEGATRON}.use_fused_linear_logprobs=true, for no logits at all"


def _lower(key: str, value: int) -> Iterator[str]:
    if value > 1:
        yield f"a lower policy.{key} (it is {value})"


def _proposals(job: Job, cfg: Mapping[str, Any]) -> Iterator[str]:
    allowances, step = sum(allowance_bytes(job.device).values()), run_configured(job)
    present = highest_peak(step)
    of_update = [text for text in lacking(job, step) if text.startswith(UPDATE)]
    if of_update and present <= job.device.memory_bytes:
        yield f"By the planner's formulas: {of_update[0]}"
        return
    if cfg["offload_modules"] == "auto" and cfg["fine_grained_activation_offloading"]:
        present = min(present, parse_bytes(cfg["activation_offload"]["gpu_memory_budget"]) + allowances)
    less = allowances + MARGIN * (present - allowances)
    enough = min(job.device.memory_bytes, less)
    plan = make_plan(replace(job, memory_bytes=int(enough)))
    rank = fullest_stage(plan.baseline)
    rows = [row for row in module_rows(plan.baseline, rank) if row.module not in job.offload_modules]
    kept_bytes = max((row.live_bytes for row in rows), default=0)
    logits_bytes = plan.baseline.stages[rank].static_bytes.get("logits", 0)
    changes = list(_changes(plan, job, cfg))
    if logits_bytes > kept_bytes:
        vocabulary, tokens = job.shape.vocabulary_rows(job.layout.tensor), job.context.tokens.count
        yield (
            f"The most are a microbatch's logits and their loss, {tokens} tokens by {vocabulary} of the vocabulary: "
            f"{gib(logits_bytes, 2)} by the planner's formulas."
        )
        first = list(_smaller_logits(job, enough))
        said = ("none that", *(text.partition("=")[0] for text in first))
        changes = [*first, *(text for text in changes if not text.startswith(said))] or changes
    elif rows:
        largest = max(rows, key=lambda row: row.live_bytes)
        yield (
            f"Most of what stays there for the backward pass is {largest.module}'s: {gib(largest.live_bytes, 2)} "
            "by the planner's formulas."
        )
    yield f"To need a tenth less: {' or '.join(changes[:NUM_CHANGES])}."


def _smaller_logits(job: Job, less_bytes: float) -> Iterator[str]:
    """What makes logits smaller by enough: none of them, smaller microbatches, or the two together."""
    fused = replace(job, makes_logits=False)
    both = ((f"{FUSED} {smaller}", changed) for smaller, changed in smaller_microbatches(fused))
    ways = [iter([(FUSED, fused)]), smaller_microbatches(job), both]
    found = [_first_that_fits(way, less_bytes) for way in ways]
    yield from [text for text in found[:2] if text is not None] or [text for text in found[2:] if text is not None]


def _first_that_fits(changes: Iterator[tuple[str, Job]], less_bytes: float) -> str | None:
    return next((text for text, job in changes if highest_peak(run_configured(job)) <= less_bytes), None)


def _changes(plan: JobPlan, job: Job, cfg: Mapping[str, Any]) -> Iterator[str]:
    smaller = dict(smaller_microbatches(plan.job))
    if plan.shortfall_bytes:
        fitting = next((text for text, changed in smaller.items() if surely_fits(changed)), None)
        others = [change for change in plan.suggestions if change not in smaller]
        yield from [fitting, *others[:2]] if fitting else others[:3]
        return
    if planned := list(_differing(plan.keys, cfg)):
        yield " ".join(planned)
    if smaller:
        yield next(iter(smaller))
    elif job.recompute.method is None and not job.expert_buffers.has_stash:
        yield " ".join(_differing(Recompute(method="uniform").keys, cfg))


_NOTHING: tuple[object, ...] = ([], None)


def _differing(
    keys: Mapping[str, object], cfg: Mapping[str, Any], section: str = "policy.megatron_cfg."
) -> Iterator[str]:
    """Overrides for what is otherwise in force."""
    for key, value in keys.items():
        if isinstance(value, Mapping):
            yield from _differing(value, cfg[key], f"{section}{key}.")
        elif value != cfg[key] and not (value in _NOTHING and cfg[key] in _NOTHING):
            yield f"{section}{key}={_value(value)}"


def _value(value: object) -> str:
    if isinstance(value, list):
        return f"[{','.join(value)}]"
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
