"""A model's weights that wait in host memory, as the reference's do until a pass for its log-probabilities."""

import os
from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from nemo_rl_offload.errors import ConfigError, ResourceError
from nemo_rl_offload.offload.arena import HostArena
from nemo_rl_offload.offload.host_memory import free_host_bytes
from nemo_rl_offload.offload.waiting_weights import WaitingWeights, covered_ranges
from nemo_rl_offload.units import gib

BUDGET_KEY = "policy.megatron_cfg.activation_offload.host_memory_budget"


def lasting_tensors(modules: Sequence[Module]) -> list[Tensor]:
    """What makes a model say what it says: parameters, and buffers that are saved with them, as routers' biases."""
    buffers = [
        buffer
        for module in modules
        for each in module.modules()
        for name, buffer in each.named_buffers(recurse=False)
        if name not in each._non_persistent_buffers_set
    ]
    return [weight for module in modules for weight in module.parameters()] + buffers


def keep_weights[T: WaitingWeights](kind: type[T], arena: HostArena, modules: Sequence[Module], whose: str) -> T:
    """Copy a model's weights into host memory. `whose` says of which model, for a message. All ranks call it together.

    Raises ConfigError where the budget has no room, and ResourceError where the machine has no memory: a system that
    is asked for more than there is ends a process rather than say so.
    """
    tensors = lasting_tensors(modules)
    needed_bytes = sum(end - begin for _, begin, end in covered_ranges(tensors))
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    _wait_for_others()
    free_bytes = free_host_bytes()
    _wait_for_others()  # whose memory is not taken yet
    if needed_bytes * num_ranks > free_bytes:
        raise ResourceError(
            f"the {whose} weights need {gib(needed_bytes, 2)} of host memory on each of {num_ranks} ranks of this "
            f"machine, and {gib(free_bytes, 2)} are free. Divide the model over more ranks, or give the machine (its "
            "container) more memory."
        )
    try:
        return kind(arena, tensors)
    except MemoryError as error:
        held = f", {gib(arena.held_bytes)} of it taken" if arena.held_bytes else ""
        raise ConfigError(
            f"{BUDGET_KEY}: {gib(arena.budget_bytes, 2)} per rank{held}, has no room for the {whose} weights: {error}. "
            "Raise it."
        ) from error


def _wait_for_others() -> None:
    if dist.is_initialized():
        dist.barrier()
