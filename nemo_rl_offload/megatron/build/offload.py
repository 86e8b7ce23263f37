"""The policy's offloading section to an installed offload engine."""

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from nemo_rl_offload.adapters.megatron_core.interface import use_engine
from nemo_rl_offload.config.schema import PolicyConfig
from nemo_rl_offload.megatron.build.transformer_config import offloaded_modules
from nemo_rl_offload.offload.backends.base import Backend
from nemo_rl_offload.offload.backends.cuda import MAX_PIECE_BYTES, CudaBackend
from nemo_rl_offload.offload.backends.host import HostBackend
from nemo_rl_offload.offload.engine import OffloadEngine
from nemo_rl_offload.offload.host_memory import host_memory_budget_bytes
from nemo_rl_offload.offload.memory_budget import Measured, MemoryBudgetController, reduce_max_over_ranks
from nemo_rl_offload.offload.selection import Selection
from nemo_rl_offload.units import parse_bytes


def install_offloading(policy: PolicyConfig) -> OffloadEngine | None:
    """Build this worker's engine and hand it to Megatron's layers; None, and no-ops, when offloading is off.

    None too with `engine: megatron`, whose own class then stays where it is. Must run before the model is built, and
    after process groups are there.
    """
    cfg = policy["megatron_cfg"]
    if not cfg["fine_grained_activation_offloading"]:
        use_engine(None)
        return None
    if cfg["activation_offload"]["engine"] == "megatron":
        return None
    host_budget_bytes = host_memory_budget_bytes(cfg["activation_offload"]["host_memory_budget"])
    gpu_budget = cfg["activation_offload"]["gpu_memory_budget"]
    auto = None
    if cfg["offload_modules"] == "auto":
        assert gpu_budget is not None, "checked with the configuration"
        auto = MemoryBudgetController(parse_bytes(gpu_budget), host_budget_bytes, _largest_of_stage)
    pipeline_rank = parallel_state.get_pipeline_model_parallel_rank()
    engine = OffloadEngine(
        make_backend(),
        host_memory_budget_bytes=host_budget_bytes,
        min_tensor_bytes=0,
        min_tensor_elements=cfg["min_offloaded_tensor_size"],
        max_inflight_groups=cfg["fine_grained_offloading_max_inflight_offloads"],
        selection=Selection(
            fraction=cfg["activation_offload_fraction"],
            kept_bytes_per_step=cfg["delta_offload_bytes_across_pp_ranks"] * pipeline_rank,
        ),
        auto=auto,
        steps_are_told=True,
    )
    use_engine(engine, offloaded_modules(cfg))
    return engine


def make_backend() -> Backend:
    """Copies to and from this process's device. Large pieces, since no layer of Megatron's waits for the link
    (`routing_result`)."""
    return CudaBackend(max_piece_out_bytes=MAX_PIECE_BYTES) if torch.cuda.is_available() else HostBackend()


def _largest_of_stage(measured: Measured) -> Measured:
    """Of the data- and tensor-parallel ranks of this pipeline stage, which must plan alike.

    As objects, since ranks may have seen different groups; every few steps, behind a synchronization of the device.
    """
    group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    gathered = [measured] * dist.get_world_size(group)
    dist.all_gather_object(gathered, measured, group=group)
    return reduce_max_over_ranks(gathered)
