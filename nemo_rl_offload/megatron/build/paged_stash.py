"""The policy's expert buffers and paged stash to what runs a training step with them."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
from torch import Tensor

from nemo_rl_offload.config.schema import PolicyConfig
from nemo_rl_offload.megatron.layers.static_experts import TorchMoELayer
from nemo_rl_offload.paged_stash.rerun import Capacity, StepGuard
from nemo_rl_offload.paged_stash.stash import PagedStash


def install_paged_stash(policy: PolicyConfig, modules: list[torch.nn.Module]) -> StepGuard | None:
    """Give the experts of a model, by its chunks without wrappers, their capacity and stash.

    None where `moe_expert_rank_capacity_factor` is null, or the layers are Transformer Engine's.
    """
    cfg = policy["megatron_cfg"]
    factor = cfg["moe_expert_rank_capacity_factor"]
    layers = [layer for chunk in modules for layer in chunk.modules() if isinstance(layer, MoELayer)]
    if factor is None or not all(isinstance(layer, TorchMoELayer) for layer in layers):
        return None
    device = torch.device(torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    capacity = Capacity(factor, device)
    stash = None
    if cfg["moe_paged_stash"]:
        stash = PagedStash(
            device,
            page_size=cfg["moe_paged_stash_page_size"],
            factor_cuda=cfg["moe_paged_stash_buffer_size_factor_cuda"],
            factor_cpu=cfg["moe_paged_stash_buffer_size_factor_cpu"],
        )
    for layer in layers:
        layer.token_dispatcher.capacity, layer.experts.stash = capacity, stash
    if stash is not None:
        for chunk in modules:
            chunk.register_forward_pre_hook(_begin_forward(stash))
    return StepGuard(capacity, stash, save=lambda: _save(modules), reduce=_largest_of_all)


def _begin_forward(stash: PagedStash) -> Callable[..., None]:
    return lambda *_: stash.begin_forward()


def _largest_of_all(values: Tensor) -> None:
    """Take the largest over all ranks, in place; any shape."""
    dist.all_reduce(values, dist.ReduceOp.MAX)


def _save(modules: list[torch.nn.Module]) -> Callable[[], None]:
    """Note random states and the models' buffers: the router's bias, its counts of tokens, and the like.

    What the routers measured is only emptied: each step begins with nothing.
    """
    buffers = [(buffer, buffer.clone()) for module in modules for buffer in module.buffers()]
    cpu, tracker = torch.get_rng_state(), get_cuda_rng_tracker()
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    states: dict[str, Tensor] = {name: state.clone() for name, state in tracker.get_states().items()}

    def put_back() -> None:
        destroy_moe_metrics_tracker()
        for buffer, value in buffers:
            buffer.copy_(value)
        tracker.set_states(states)
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)

    return put_back
