"""Builds the offload engine that Megatron-Core's layers use, where a policy says how."""

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from nemo_rl_offload.adapters.megatron_core.interface import use_engine
from nemo_rl_offload.offload.arena import HostArena
from nemo_rl_offload.offload.backends.base import Backend
from nemo_rl_offload.offload.backends.cuda import MAX_PIECE_BYTES, CudaBackend
from nemo_rl_offload.offload.backends.host import HostBackend
from nemo_rl_offload.offload.engine import OffloadEngine
from nemo_rl_offload.offload.memory_budget import Measured, reduce_max_over_ranks
from nemo_rl_offload.offload.options import OffloadOptions, build_engine
from nemo_rl_offload.specs.offload_modules import NATIVE_MODULES


def install_engine(options: OffloadOptions | None, arena: HostArena | None = None) -> OffloadEngine | None:
    """Build this process's engine and hand it to Megatron's layers; None turns their offloading into a no-op.

    Call it before the model is built, in every process. With `modules="auto"` Megatron's `offload_modules` lists all
    that may be chosen from. Tell the engine of the model's parameters afterwards (`interface.exclude_parameters`).
    `arena` is host memory that others of this process use too.
    """
    if options is None:
        use_engine(None)
        return None
    backend = make_backend() if arena is None else arena.backend
    engine = build_engine(
        options, backend, arena=arena, reduce_max_over_ranks=reduce_max_over_stage, steps_are_told=True
    )
    use_engine(engine, NATIVE_MODULES if options.modules == "auto" else options.modules)
    return engine


def make_backend() -> Backend:
    """Copies to and from this process's device. Large pieces, since no layer of Megatron's waits for the link
    (`routing_result`)."""
    return CudaBackend(max_piece_out_bytes=MAX_PIECE_BYTES) if torch.cuda.is_available() else HostBackend()


def reduce_max_over_stage(measured: Measured) -> Measured:
    """Of the data- and tensor-parallel ranks of this pipeline stage, which must plan alike.

    As objects, since ranks may have seen different groups; every few steps, behind a synchronization of the device.
    """
    group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    gathered = [measured] * dist.get_world_size(group)
    dist.all_gather_object(gathered, measured, group=group)
    return reduce_max_over_ranks(gathered)
