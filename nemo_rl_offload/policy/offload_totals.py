"""What the engines of all ranks did, as one figure each; and why a listed module offloaded nothing."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nemo_rl_offload.config.schema import PolicyConfig
from nemo_rl_offload.specs.activation_memory import resolve_activations

_SUMS = (
    *("bytes_out", "bytes_in", "peak_host_bytes", "host_capacity_bytes", "denied_bytes", "kept_bytes"),
    *("ineffective_bytes", "returned_bytes", "demand_reloads"),
)
_OF_MODULES = ("bytes_out", "bytes_in", "denied_bytes", "kept_bytes", "small_bytes", "num_groups")


def offload_totals(policy: PolicyConfig, per_rank: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Add up the `OffloadStats` of the ranks, as dictionaries, beside `engine` and `modules` as configured.

    `stall_out_ms` and `stall_in_ms` are those of the rank that waited longest, `copy_ms` and `overlap` of all; they
    are None where nothing was timed, as on a CPU. Without offloading the sums are 0; they are None with Megatron-Core's
    engine, which counts nothing.
    """
    activations = resolve_activations(policy["megatron_cfg"])
    engine = activations.engine if activations.offloads else None
    is_counted = engine != "megatron"
    moved = {name for stats in per_rank for name, each in stats["per_module"].items() if each["bytes_out"]}
    modules = sorted(moved) if activations.is_auto else list(activations.listed_modules)
    return {
        "engine": engine,
        "modules": modules,
        **{name: sum(stats[name] for stats in per_rank) if is_counted else None for name in _SUMS},
        **_times(per_rank),
        "per_module": {module: _of_module(module, per_rank) for module in modules} if is_counted else {},
    }


def _of_module(module: str, per_rank: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    found = [stats["per_module"].get(module, {}) for stats in per_rank]
    return {name: sum(each.get(name, 0) for each in found) for name in _OF_MODULES}


def _times(per_rank: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    names = ("stall_out_ms", "stall_in_ms")
    copy_ms = sum(stats["copy_ms"] for stats in per_rank)
    if not copy_ms:
        return dict.fromkeys((*names, "copy_ms", "overlap"))
    waited_ms = sum(stats[name] for stats in per_rank for name in names)
    longest = {name: max(stats[name] for stats in per_rank) for name in names}
    return longest | {"copy_ms": copy_ms, "overlap": max(0.0, 1 - waited_ms / copy_ms)}


def idle_modules(policy: PolicyConfig, totals: Mapping[str, Any]) -> Iterator[str]:
    """Of `offload_totals` after a step: the listed modules that offloaded nothing, in a sentence for each reason."""
    min_elements = policy["megatron_cfg"]["min_offloaded_tensor_size"]
    reasons: dict[str, list[str]] = {}
    for module, counted in totals["per_module"].items():
        if not counted["num_groups"]:
            reasons.setdefault(_why_idle(counted, min_elements), []).append(module)
    for reason, modules in reasons.items():
        yield f"policy.megatron_cfg.offload_modules: nothing is offloaded of {', '.join(modules)}: {reason}"


def _why_idle(counted: Mapping[str, int], min_elements: int) -> str:
    if counted["denied_bytes"]:
        return "activation_offload.host_memory_budget leaves no room. Raise that."
    if counted["kept_bytes"]:
        return "activation_offload_fraction and delta_offload_bytes_across_pp_ranks leave all on the device."
    if counted["small_bytes"]:
        return f"the tensors saved there are below min_offloaded_tensor_size={min_elements} elements. Lower that."
    return "no tensor is saved there in this model. Take it out of the list."
