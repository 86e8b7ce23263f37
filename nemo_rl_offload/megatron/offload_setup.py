"""The policy's offloading section to an installed offload engine."""

import os

import torch

from nemo_rl_offload.config.loader import parse_bytes
from nemo_rl_offload.config.schema import PolicyConfig
from nemo_rl_offload.megatron.offload_interface import use_engine
from nemo_rl_offload.observability.host_memory import free_host_bytes
from nemo_rl_offload.offload.backends.base import Backend
from nemo_rl_offload.offload.backends.cuda import CudaBackend
from nemo_rl_offload.offload.backends.host import HostBackend
from nemo_rl_offload.offload.engine import OffloadEngine


def install_offloading(policy: PolicyConfig) -> OffloadEngine | None:
    """Build this worker's engine and hand it to Megatron's layers; None, and no-ops, when offloading is off.

    None too with `engine: megatron`, whose own class then stays where it is. Must run before the model is built.
    """
    cfg = policy["megatron_cfg"]
    if not cfg["fine_grained_activation_offloading"]:
        use_engine(None)
        return None
    if cfg["activation_offload"]["engine"] == "megatron":
        return None
    backend: Backend = CudaBackend() if torch.cuda.is_available() else HostBackend()
    engine = OffloadEngine(
        backend,
        host_memory_budget_bytes=host_memory_budget_bytes(cfg["activation_offload"]["host_memory_budget"]),
        min_tensor_bytes=0,
        min_tensor_elements=cfg["min_offloaded_tensor_size"],
    )
    use_engine(engine, cfg["offload_modules"] or [])
    return engine


def host_memory_budget_bytes(budget: float | str) -> int:
    """Bytes for this rank: a size as it is, or a share of the node's free memory divided by the ranks on the node."""
    if isinstance(budget, str):
        return parse_bytes(budget)
    return int(free_host_bytes() * budget) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
