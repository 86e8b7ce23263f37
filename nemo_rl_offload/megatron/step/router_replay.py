"""Which of a batch's routed experts the routers of a rank replay: its layers', of its part of the tokens."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from nemo_rl_offload.batching.batch import ROUTED_EXPERTS
from nemo_rl_offload.megatron.layers.router_replay import routers_of
from nemo_rl_offload.megatron.step.context_parallel import shard_for_cp
from nemo_rl_offload.megatron.step.microbatches import Microbatch


@contextmanager
def replaying(chunk: GPTModel, microbatch: Microbatch) -> Iterator[None]:
    """Let a chunk's forward, and its recomputation, take the microbatch's experts; its own where it brings none."""
    routes_BSLK = microbatch.batch.get(ROUTED_EXPERTS)
    routers = list(routers_of(chunk)) if routes_BSLK is not None else []
    if routes_BSLK is None or not routers:
        yield
        return
    places = places_of_layers(chunk.config)
    own = [places[router.layer_number] for router in routers]
    routes_BSLK = microbatch.for_model(_on_device(routes_BSLK[:, :, own]))
    routes_TLK = _tokens_of_rank(shard_for_cp(routes_BSLK, microbatch.part), chunk.config)
    for router, routes_TK in zip(routers, routes_TLK.unbind(1), strict=True):
        router.router_replay.begin(routes_TK, repeats=chunk.training)
    yield
    for router in routers:
        router.router_replay.end()


def end_replay(chunks: Sequence[GPTModel]) -> None:
    """Let all routers choose for themselves again, also where a step failed."""
    for chunk in chunks:
        for router in routers_of(chunk):
            if router.router_replay is not None:
                router.router_replay.clear()


def places_of_layers(config: TransformerConfig) -> dict[int, int]:
    """Of each layer with experts, by its number from 1 in the whole model: its place among them."""
    pattern = config.moe_layer_freq
    if isinstance(pattern, int):
        pattern = [layer % pattern == 0 for layer in range(config.num_layers)]
    with_experts = [layer for layer, has_experts in enumerate(pattern, start=1) if has_experts]
    return {layer: place for place, layer in enumerate(with_experts)}


def _on_device(routes: Tensor) -> Tensor:
    """A copy from memory that is not pinned would let the host wait for everything queued on the device."""
    pinned = routes.pin_memory() if torch.cuda.is_available() else routes
    return pinned.to(torch.cuda.current_device(), non_blocking=True)


def _tokens_of_rank(routes_BSLK: Tensor, config: TransformerConfig) -> Tensor:
    """[tokens, layers, top-k] in the order of a layer's tokens, [S, B]; under sequence parallelism the rank's part."""
    routes_SBLK = routes_BSLK.transpose(0, 1)
    if config.sequence_parallel:
        size, rank = config.tensor_model_parallel_size, parallel_state.get_tensor_model_parallel_rank()
        routes_SBLK = routes_SBLK.chunk(size)[rank]
    return routes_SBLK.flatten(0, 1)
