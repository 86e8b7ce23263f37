"""Whether what waits in host memory throughout a run has room in its budget, as far as a configuration says it.

A budget that is a share of a machine's memory is the machine's to say. Where a run starts its workers on this machine
alone, it is known here; else a worker looks at that when it has built its model, before anything moves.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import reduce
from operator import getitem
from typing import Any, Literal, cast

from nemo_rl_offload.config.algorithms import ALGORITHMS
from nemo_rl_offload.config.rules.parallel import training_and_generating
from nemo_rl_offload.config.rules.rule import model_content, read_model_config
from nemo_rl_offload.config.schema import MasterConfig, MegatronConfig
from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.planner.cost.memory import stage_parameters, state_bytes, trained_parameters
from nemo_rl_offload.planner.job import read_adapters, read_layout, read_optimizer
from nemo_rl_offload.specs.model_shape import ModelShape, parse_model_shape
from nemo_rl_offload.specs.parallel_layout import ParallelLayout, stage_layers
from nemo_rl_offload.units import human_bytes, parse_bytes

KEY = "policy.megatron_cfg.activation_offload.host_memory_budget"
_SENT = "what offload_optimizer_for_logprob sends there"


@dataclass(frozen=True)
class Here:
    """The one machine that all workers of a run are on."""

    num_workers: int
    free_bytes: int
    """Of host memory."""
    has_gpus: bool = True
    """Without, nothing leaves the device for vLLM."""


def host_problems(config: MasterConfig, here: Here | None = None) -> Iterator[str]:
    """A problem where what of the optimizer is or goes to the host and the reference's weights are above the budget of
    a rank. `config` has no other problem."""
    policy = config["policy"]
    megatron_cfg = policy["megatron_cfg"]
    budget, optimizer = megatron_cfg["activation_offload"]["host_memory_budget"], megatron_cfg["optimizer"]
    spec, is_kept = ALGORITHMS[config["algorithm"]], optimizer["optimizer_cpu_offload"]
    keeps_reference = spec.copies_reference(config)
    leaves = policy["offload_optimizer_for_logprob"] and spec.has_logprob_passes and not spec.needs_teacher
    leaves = leaves and (here is None or here.has_gpus)
    if here is None and not isinstance(budget, str):
        return
    if spec.needs_teacher and (here is None or here.has_gpus):
        yield from _teacher_problems(config, budget, here)
    if not (is_kept or leaves or keeps_reference) or (shape := _shape(config, "policy")) is None:
        return
    element_bytes = 4 if policy["precision"] == "float32" else 2
    needed: dict[str, int] = {}
    if (is_kept or leaves) and (layout := _layout(config, here)) is not None:
        kept, rest = map(max, zip(*_optimizer_bytes(config, shape, layout, element_bytes), strict=True))
        needed |= {"what optimizer_cpu_offload keeps there": kept} if is_kept else {}
        needed |= {_SENT: rest} if leaves and rest else {}
    if keeps_reference:
        needed["the reference's weights"] = max(_weights_bytes(shape, _least_layout(megatron_cfg), element_bytes))
    budget_bytes, told = _budget(config, budget, here)
    if sum(needed.values()) > budget_bytes:
        parts = " and ".join(f"{what} ({human_bytes(size)})" for what, size in needed.items())
        over = "ranks" if isinstance(budget, str) else "machines"  # a share is divided as the state is
        other = f"or divide the model over more {over}"
        if is_kept:
            other = f"lower optimizer.optimizer_offload_fraction, or divide the state over more {over}"
            if not optimizer["use_distributed_optimizer"] and (here is None or here.num_workers > 1):
                other = "lower optimizer.optimizer_offload_fraction, or set optimizer.use_distributed_optimizer=true"
        if _SENT in needed:
            other = "or leave out policy.offload_optimizer_for_logprob"
        yield f"{KEY}: {told} a rank has no room for {parts}. Raise it, {other}."


def _teacher_problems(config: MasterConfig, budget: float | str, here: Here | None) -> Iterator[str]:
    """The teacher's workers have a budget of their own, of the same key, for weights that wait while others train."""
    if (shape := _shape(config, "teacher")) is None:
        return
    is_wide = (config["teacher"]["precision"] or config["policy"]["precision"]) == "float32"
    layout = _least_layout(config["policy"]["megatron_cfg"])
    layout = replace(layout, num_layers_first=None, num_layers_last=None, stages=None, virtual=1)
    needed_bytes = max(_weights_bytes(shape, layout, 4 if is_wide else 2))
    budget_bytes, told = _budget(config, budget, here)
    if needed_bytes > budget_bytes:
        yield (
            f"{KEY}: {told} a rank has no room for the teacher's weights ({human_bytes(needed_bytes)}). Raise it, or "
            "divide the model over more ranks."
        )


def _shape(config: MasterConfig, section: Literal["policy", "teacher"]) -> ModelShape | None:
    """Of the section's model; None where a warning says that rules about it were not checked."""
    try:
        if section == "teacher":
            content = read_model_config(str(config["teacher"]["model_name"]))
        else:
            content = model_content(lambda path: reduce(getitem, path.split("."), cast("Any", config)))
        return parse_model_shape(content).shape
    except ConfigError:
        return None


def _budget(config: MasterConfig, budget: float | str, here: Here | None) -> tuple[int, str]:
    """Of a rank, in bytes and in words."""
    if isinstance(budget, str):
        return parse_bytes(budget), budget
    assert here is not None
    num_bytes = int(here.free_bytes * budget) // max(_num_training(config, here.num_workers), 1)
    return num_bytes, f"{human_bytes(num_bytes)} ({budget:g} of the free {human_bytes(here.free_bytes)} for all ranks)"


def _num_training(config: MasterConfig, per_node: int) -> int:
    generates = ALGORITHMS[config["algorithm"]].generates
    colocated = config["policy"]["generation"]["colocated"] if generates else {"enabled": True}
    return training_and_generating(colocated, config["cluster"]["num_nodes"], per_node)[0]


def _layout(config: MasterConfig, here: Here | None) -> ParallelLayout | None:
    """None where the number of workers is the machine's to say, and decides, or is too small."""
    megatron_cfg, per_node = config["policy"]["megatron_cfg"], config["cluster"]["gpus_per_node"]
    if per_node == "auto" and here is not None:
        per_node = here.num_workers
    if per_node != "auto":
        layout = read_layout(megatron_cfg, _num_training(config, per_node))
        return layout if layout.data > 0 else None  # too few workers, which the run says
    return None if megatron_cfg["optimizer"]["use_distributed_optimizer"] else _least_layout(megatron_cfg)


def _least_layout(megatron_cfg: MegatronConfig) -> ParallelLayout:
    """Of one copy of the model."""
    layout = read_layout(megatron_cfg, 1)
    return replace(layout, world=layout.tensor * layout.pipeline * layout.context)


def _weights_bytes(shape: ModelShape, layout: ParallelLayout, element_bytes: int) -> Iterator[int]:
    """Of each pipeline stage."""
    for rank, chunks in enumerate(stage_layers(layout, shape.num_layers)):
        yield stage_parameters(shape, layout, chunks, rank).total * element_bytes


def _optimizer_bytes(
    config: MasterConfig, shape: ModelShape, layout: ParallelLayout, element_bytes: int
) -> Iterator[tuple[int, int]]:
    """Of each pipeline stage, what optimizer_cpu_offload keeps on the host, and the rest."""
    policy = config["policy"]
    optimizer, adapters = read_optimizer(policy, element_bytes), read_adapters(policy["megatron_cfg"])
    for rank, chunks in enumerate(stage_layers(layout, shape.num_layers)):
        parameters = trained_parameters(shape, layout, chunks, rank, adapters)
        whole = state_bytes(parameters, layout, replace(optimizer, share_on_host=0.0), element_bytes)["optimizer"]
        kept = round(whole * optimizer.share_on_host)
        yield kept, whole - kept
