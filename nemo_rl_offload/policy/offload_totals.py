"""What the engines of all ranks did, as one figure each; and why a listed module offloaded nothing."""

from collections.abc import Callable, Iterator, Sequence

from nemo_rl_offload.config.schema import PolicyConfig
from nemo_rl_offload.offload.stats import ModuleStats, OffloadStats
from nemo_rl_offload.runs.run_files import ModuleTotals, OffloadTotals
from nemo_rl_offload.specs.activation_memory import resolve_activations


def offload_totals(policy: PolicyConfig, per_rank: Sequence[OffloadStats]) -> OffloadTotals:
    """Add up the statistics of the ranks' engines, beside `engine` and `modules` as configured.

    `stall_out_ms` and `stall_in_ms` are those of the rank that waited longest, `copy_ms` and `overlap` of all; they
    are None where nothing was timed, as on a CPU. Without offloading the sums are 0; they are None with Megatron-Core's
    engine, which counts nothing.
    """
    activations = resolve_activations(policy["megatron_cfg"])
    engine = activations.engine if activations.offloads else None
    is_counted = engine != "megatron"
    moved = {name for stats in per_rank for name, each in stats.per_module.items() if each.bytes_out}
    modules = sorted(moved) if activations.is_auto else list(activations.listed_modules)

    def total(read: Callable[[OffloadStats], int]) -> int | None:
        return sum(map(read, per_rank)) if is_counted else None

    copy_ms = sum(stats.copy_ms for stats in per_rank)
    waited_ms = sum(stats.stall_out_ms + stats.stall_in_ms for stats in per_rank)
    return {
        "engine": engine,
        "modules": modules,
        "bytes_out": total(lambda stats: stats.bytes_out),
        "bytes_in": total(lambda stats: stats.bytes_in),
        "peak_host_bytes": total(lambda stats: stats.peak_host_bytes),
        "host_capacity_bytes": total(lambda stats: stats.host_capacity_bytes),
        "denied_bytes": total(lambda stats: stats.denied_bytes),
        "kept_bytes": total(lambda stats: stats.kept_bytes),
        "ineffective_bytes": total(lambda stats: stats.ineffective_bytes),
        "returned_bytes": total(lambda stats: stats.returned_bytes),
        "demand_reloads": total(lambda stats: stats.demand_reloads),
        "stall_out_ms": max(stats.stall_out_ms for stats in per_rank) if copy_ms else None,
        "stall_in_ms": max(stats.stall_in_ms for stats in per_rank) if copy_ms else None,
        "copy_ms": copy_ms or None,
        "overlap": max(0.0, 1 - waited_ms / copy_ms) if copy_ms else None,
        "per_module": {module: _of_module(module, per_rank) for module in modules} if is_counted else {},
    }


def _of_module(module: str, per_rank: Sequence[OffloadStats]) -> ModuleTotals:
    found = [stats.per_module.get(module, ModuleStats()) for stats in per_rank]
    return {
        "bytes_out": sum(each.bytes_out for each in found),
        "bytes_in": sum(each.bytes_in for each in found),
        "denied_bytes": sum(each.denied_bytes for each in found),
        "kept_bytes": sum(each.kept_bytes for each in found),
        "small_bytes": sum(each.small_bytes for each in found),
        "num_groups": sum(each.num_groups for each in found),
    }


def idle_modules(policy: PolicyConfig, totals: OffloadTotals) -> Iterator[str]:
    """Of `offload_totals` after a step: the listed modules that offloaded nothing, in a sentence for each reason."""
    min_elements = policy["megatron_cfg"]["min_offloaded_tensor_size"]
    reasons: dict[str, list[str]] = {}
    for module, counted in totals["per_module"].items():
        if not counted["num_groups"]:
            reasons.setdefault(_why_idle(counted, min_elements), []).append(module)
    for reason, modules in reasons.items():
        yield f"policy.megatron_cfg.offload_modules: nothing is offloaded of {', '.join(modules)}: {reason}"


def _why_idle(counted: ModuleTotals, min_elements: int) -> str:
    if counted["denied_bytes"]:
        return "activation_offload.host_memory_budget leaves no room. Raise that."
    if counted["kept_bytes"]:
        return "activation_offload_fraction and delta_offload_bytes_across_pp_ranks leave all on the device."
    if counted["small_bytes"]:
        return f"the tensors saved there are below min_offloaded_tensor_size={min_elements} elements. Lower that."
    return "no tensor is saved there in this model. Take it out of the list."
