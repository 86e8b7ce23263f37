"""Megatron-Core's optimizers with their state in host memory (`streamed_optimizer`).

Megatron wraps a torch optimizer. What it does around that one's step stays as it is but for two things: gradients are
given to main weights, which must be on the gradients' device at that moment, so a tensor without memory of its own
takes their place; and the main weights that have gone are copied to the model's while they pass through the device.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer, MegatronOptimizer
from torch import Tensor

from nemo_rl_offload.config.schema import PolicyConfig
from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.megatron.protocols import Optimizer
from nemo_rl_offload.offload.arena import HostArena
from nemo_rl_offload.policy.residency.streamed_optimizer import BUCKET_BYTES, Parameter, StreamedOptimizer


def keep_what_waits_on_host(policy: PolicyConfig, arena: HostArena, optimizer: Optimizer) -> None:
    """Move what a policy's keys want in host memory there."""
    section = policy["megatron_cfg"]["optimizer"]
    if section["optimizer_cpu_offload"]:
        keep_on_host(optimizer, arena, section["optimizer_offload_fraction"])


def keep_on_host(
    optimizer: Optimizer, arena: HostArena, share: float, *, bucket_bytes: int = BUCKET_BYTES
) -> list[StreamedOptimizer]:
    """Move `share` of the bytes of each of a model's optimizers to host memory: state and main weights.

    Call it once, after the model and its optimizer were built. Raises ConfigError where the arena has no room, and for
    optimizers and weights that are not known here.
    """
    chained: Sequence[MegatronOptimizer] = getattr(optimizer, "chained_optimizers", [optimizer])
    return [
        _keep_one(each, arena, share, bucket_bytes)
        for each in chained
        if each.optimizer is not None and not getattr(each, "is_stub_optimizer", False)
    ]


def _keep_one(optimizer: MegatronOptimizer, arena: HostArena, share: float, bucket_bytes: int) -> StreamedOptimizer:
    model_weights = {id(main): copied_to for main, copied_to in _main_weights(optimizer)}
    parameters = [
        Parameter(weight, number, model_weights.get(id(weight)))
        for number, group in enumerate(optimizer.optimizer.param_groups)
        for weight in group["params"]
        if weight.numel() and weight.is_contiguous()
    ]
    streamed = StreamedOptimizer(optimizer.optimizer, arena, parameters, share=share, bucket_bytes=bucket_bytes)
    if gone := streamed.main_weights:
        optimizer.prepare_grads = partial(_prepare_grads, optimizer.prepare_grads, gone, arena.backend.device)
        names, ids = _names(optimizer), {id(main) for main, _ in gone}
        optimizer._copy_main_params_to_model_params = partial(
            _copy_resident, optimizer, optimizer._copy_main_params_to_model_params, _resident(optimizer, names, ids)
        )
    return streamed


def _names(optimizer: MegatronOptimizer) -> tuple[str, str]:
    """The lists, by group, of a model's weights and of their float32 copies."""
    if isinstance(optimizer, DistributedOptimizer):
        return "model_float16_groups", "shard_fp32_from_float16_groups"
    return "float16_groups", "fp32_from_float16_groups"


def _main_weights(optimizer: MegatronOptimizer) -> Iterator[tuple[Tensor, Callable[[], Tensor]]]:
    """Main weights that are copies, and the flat part of a model's weight that each is of."""
    if isinstance(optimizer, FP32Optimizer):
        return
    if not isinstance(optimizer, DistributedOptimizer | Float16OptimizerWithFloat16Params):
        raise ConfigError(
            "policy.megatron_cfg.optimizer.optimizer_cpu_offload: not for Megatron-Core's "
            f"{type(optimizer).__name__}. Set it to false."
        )
    if isinstance(optimizer, DistributedOptimizer) and optimizer.ddp_config.fp8_param_gather:
        raise ConfigError(
            "policy.megatron_cfg.optimizer.optimizer_cpu_offload: not with weights in 8 bits. Set it to false."
        )
    of_model, of_main = (getattr(optimizer, name) for name in _names(optimizer))
    for model_group, main_group in zip(of_model, of_main, strict=True):
        for model, main in zip(model_group, main_group, strict=True):
            if main is None:  # Transformer Engine's Adam has it in its state
                continue
            part = slice(None)
            if isinstance(optimizer, DistributedOptimizer):
                found = optimizer._get_model_param_range_map(model)["param"]
                part = slice(found.start, found.end)
            yield main, partial(_flat, model, part)


def _flat(weight: Tensor, part: slice) -> Tensor:
    return weight.data.view(-1)[part]


def _resident(optimizer: MegatronOptimizer, names: tuple[str, str], gone: set[int]) -> dict[str, list[list[Tensor]]]:
    """Those lists without the main weights that have gone."""
    of_model, of_main = (getattr(optimizer, name) for name in names)
    kept = [
        [(model, main) for model, main in zip(*groups, strict=True) if id(main) not in gone]
        for groups in zip(of_model, of_main, strict=True)
    ]
    return {name: [[pair[index] for pair in pairs] for pairs in kept] for index, name in enumerate(names)}


def _prepare_grads(prepare: Callable[[], bool], gone: Sequence[tuple[Tensor, Tensor]], device: torch.device) -> bool:
    """A gradient can be given to a tensor on its own device alone. What is read of this one by mistake is no number."""
    nothing = torch.full((1,), torch.nan, device=device)
    for weight, _ in gone:
        weight.data = nothing.expand(weight.shape)
    try:
        return prepare()
    finally:
        for weight, home in gone:
            weight.data = home


def _copy_resident(optimizer: Any, copy: Callable[[], None], kept: dict[str, list[list[Tensor]]]) -> None:
    whole = {name: getattr(optimizer, name) for name in kept}
    try:
        vars(optimizer).update(kept)
        copy()
    finally:
        vars(optimizer).update(whole)
