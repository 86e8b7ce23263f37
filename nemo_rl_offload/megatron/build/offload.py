"""A policy's offloading to what the engine is told. Megatron's own fields are set in `transformer_config`."""

from megatron.core import parallel_state

from nemo_rl_offload.adapters.megatron_core.installation import install_engine, make_backend
from nemo_rl_offload.config.schema import MegatronConfig, PolicyConfig
from nemo_rl_offload.offload.arena import HostArena
from nemo_rl_offload.offload.engine import OffloadEngine
from nemo_rl_offload.offload.host_memory import host_memory_budget_bytes
from nemo_rl_offload.offload.options import OffloadOptions
from nemo_rl_offload.specs.activation_memory import ResolvedActivations, resolve_activations
from nemo_rl_offload.units import parse_bytes


def make_arena(policy: PolicyConfig) -> HostArena:
    """This worker's host memory, for activations and whatever else waits there; takes none before it is asked for."""
    budget = policy["megatron_cfg"]["activation_offload"]["host_memory_budget"]
    return HostArena(make_backend(), host_memory_budget_bytes(budget))


def install_offloading(policy: PolicyConfig, arena: HostArena | None = None) -> OffloadEngine | None:
    """Build this worker's engine and hand it to Megatron's layers; None, and no-ops, when offloading is off.

    None too with `engine: megatron`, whose own class then stays where it is. Must run before the model is built, and
    after process groups are there. `arena` is host memory that others use too; None: the engine's own.
    """
    activations = resolve_activations(policy["megatron_cfg"])
    if not activations.offloads:
        return install_engine(None)
    if not activations.is_native:
        return None
    return install_engine(_options(activations, policy["megatron_cfg"]), arena)


def _options(activations: ResolvedActivations, megatron_cfg: MegatronConfig) -> OffloadOptions:
    budgets = megatron_cfg["activation_offload"]
    gpu_budget_bytes = None
    if activations.is_auto:
        assert budgets["gpu_memory_budget"] is not None, "checked with the configuration"
        gpu_budget_bytes = parse_bytes(budgets["gpu_memory_budget"])
    pipeline_rank = parallel_state.get_pipeline_model_parallel_rank()
    return OffloadOptions(
        modules="auto" if activations.is_auto else activations.modules,
        host_memory_budget_bytes=host_memory_budget_bytes(budgets["host_memory_budget"]),
        gpu_memory_budget_bytes=gpu_budget_bytes,
        min_tensor_bytes=0,
        min_tensor_elements=megatron_cfg["min_offloaded_tensor_size"],
        fraction=megatron_cfg["activation_offload_fraction"],
        kept_bytes_per_step=megatron_cfg["delta_offload_bytes_across_pp_ranks"] * pipeline_rank,
        max_inflight_groups=megatron_cfg["fine_grained_offloading_max_inflight_offloads"],
    )
