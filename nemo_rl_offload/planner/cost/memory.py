"""Device memory that saved activations have no part in: weights, gradients, optimizer, allowance."""

from collections.abc import Sequence
from dataclasses import dataclass

from nemo_rl_offload.offload.overlap import FRAGMENTATION
from nemo_rl_offload.planner.cost.parameters import (
    ParameterCount,
    embedding_parameters,
    layer_parameters,
    mtp_parameters,
)
from nemo_rl_offload.specs.devices import Device
from nemo_rl_offload.specs.lora import Adapters, adapted, adapter_parameters
from nemo_rl_offload.specs.model_shape import ModelShape
from nemo_rl_offload.specs.parallel_layout import ParallelLayout
from nemo_rl_offload.units import GIB

RUNTIME_BYTES = int(1.5 * GIB)
"""CUDA context, communicators' buffers and libraries' workspaces of one rank."""


@dataclass(frozen=True)
class Optimizer:
    """What decides the size of gradients and of the optimizer's state."""

    distributed: bool = True
    """Split over the data-parallel ranks."""
    gradient_bytes: int = 4
    """Per parameter: 4 when gradients are reduced in float32."""
    state_bytes: int = 8
    """Per parameter, beside the master weights: Adam's two moments in float32."""
    master_bytes: int = 4
    """Per parameter: float32 weights beside narrower ones; 0 where the weights are float32."""
    gradient_copy_bytes: int = 0
    """Per parameter, while it steps: float32 copies of narrower gradients, for an optimizer that reads no others."""
    could_read_gradients: bool = False
    """Whether `use_precision_aware_optimizer` would make no such copies, and is allowed."""
    share_on_host: float = 0.0
    """Share of state and master weights that stays in host memory."""


EIGHT_BIT_COPIES = "copies of weights in 8 bits"


def eight_bit_copies_bytes(shape: ModelShape, layout: ParallelLayout, chunks: Sequence[range], rank: int) -> int:
    """What Transformer Engine keeps of a stage's layers from one microbatch to the next: each weight in two
    directions, 1 byte each. Norms, routers and scales count for nothing beside them."""
    layers = [layer for chunk in chunks for layer in chunk]
    if rank == layout.pipeline - 1:
        layers += range(shape.num_layers, len(shape.all_kinds))
    return sum(2 * layer_parameters(shape, shape.all_kinds[layer], layout.split).total for layer in layers)


def stage_parameters(shape: ModelShape, layout: ParallelLayout, chunks: Sequence[range], rank: int) -> ParameterCount:
    """Parameters of one rank of pipeline stage `rank`; tied embeddings count on both ends of the pipeline."""
    split = layout.split
    is_first, is_last = rank == 0, rank == layout.pipeline - 1
    total = ParameterCount(0, 0)
    for layer in (layer for chunk in chunks for layer in chunk):
        total += layer_parameters(shape, shape.layer_kinds[layer], split)
    embedding = ParameterCount(embedding_parameters(shape, split), 0)
    if is_first or (is_last and shape.num_mtp_layers):
        total += embedding
    if is_last:
        total += mtp_parameters(shape, split) + ParameterCount(shape.hidden_size, 0)
        if not (shape.tied_embeddings and is_first):
            total += embedding
    return total


def stage_adapters(
    shape: ModelShape, layout: ParallelLayout, chunks: Sequence[range], rank: int, adapters: Adapters
) -> ParameterCount:
    """Parameters of the adapters on one rank of pipeline stage `rank`."""
    layers = {layer for chunk in chunks for layer in chunk}
    if rank == layout.pipeline - 1:
        layers |= set(range(shape.num_layers, shape.num_layers + shape.num_mtp_layers + 1))  # the output layer too
    counts = {False: 0, True: 0}
    of_experts = 1 if adapters.experts_share or shape.experts is None else shape.experts.num_experts // layout.expert
    for one in adapted(shape, adapters.targets, adapters.excluded):
        if one.linear.layer in layers:
            num = of_experts if one.linear.is_of_experts else 1
            counts[one.linear.is_of_experts] += num * adapter_parameters(one, adapters.dim, layout.tensor)
    return ParameterCount(counts[False], counts[True])


def trained_parameters(
    shape: ModelShape, layout: ParallelLayout, chunks: Sequence[range], rank: int, adapters: Adapters | None
) -> ParameterCount:
    """What the optimizer of one rank of pipeline stage `rank` updates: adapters, or all weights."""
    if adapters is None:
        return stage_parameters(shape, layout, chunks, rank)
    return stage_adapters(shape, layout, chunks, rank, adapters)


def state_bytes(
    parameters: ParameterCount,
    layout: ParallelLayout,
    optimizer: Optimizer,
    element_bytes: int,
    adapters: ParameterCount | None = None,
) -> dict[str, int]:
    """Weights, gradients and optimizer state of one rank, in bytes of the device; with adapters, the last two are
    theirs."""
    if adapters is not None:
        weights = parameters.total * element_bytes
        trained = state_bytes(adapters, layout, optimizer, element_bytes)
        return {**trained, "weights": weights + trained["weights"]}
    return {
        "weights": parameters.total * element_bytes,
        "gradients": parameters.total * optimizer.gradient_bytes,
        "optimizer": round(_optimizer_bytes(parameters, layout, optimizer) * (1 - optimizer.share_on_host)),
    }


def optimizer_host_bytes(parameters: ParameterCount, layout: ParallelLayout, optimizer: Optimizer) -> int:
    """State and main weights of one rank that stay in host memory."""
    return round(_optimizer_bytes(parameters, layout, optimizer) * optimizer.share_on_host)


def optimizer_parameters(parameters: ParameterCount, layout: ParallelLayout, optimizer: Optimizer) -> int:
    """How many parameters one rank's optimizer updates."""
    return _share_of_rank(parameters, layout, optimizer, 1)


def _optimizer_bytes(parameters: ParameterCount, layout: ParallelLayout, optimizer: Optimizer) -> int:
    return _share_of_rank(parameters, layout, optimizer, optimizer.state_bytes + optimizer.master_bytes)


def _share_of_rank(parameters: ParameterCount, layout: ParallelLayout, optimizer: Optimizer, each: int) -> int:
    data, expert_data = layout.data * layout.context, layout.expert_data
    if not optimizer.distributed:
        data = expert_data = 1
    return -(-parameters.shared * each // data) + -(-parameters.expert * each // expert_data)


def allowance_bytes(device: Device) -> dict[str, int]:
    """Memory that no formula here explains."""
    return {"runtime": RUNTIME_BYTES, "fragmentation": int(device.memory_bytes * FRAGMENTATION)}
