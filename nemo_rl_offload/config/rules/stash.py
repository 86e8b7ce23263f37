"""Rules about the experts' buffers of fixed size and the paged stash."""

from collections.abc import Iterator

from nemo_rl_offload.config.rules.rule import (
    MEGATRON,
    Get,
    Rule,
    is_native,
    megatron,
    model_shape,
    offloaded,
    recompute,
    recomputed,
)
from nemo_rl_offload.specs.offload_modules import STASHED_MODULES

STASH = f"{MEGATRON}.moe_paged_stash"
FACTOR = f"{MEGATRON}.moe_expert_rank_capacity_factor"


def _paged_stash(get: Get) -> Iterator[str]:
    if not megatron(get, "moe_paged_stash"):
        return
    if megatron(get, "moe_expert_rank_capacity_factor") is None:
        yield f"{FACTOR}: moe_paged_stash needs it. Set a factor, like 1.5, or turn moe_paged_stash off."
    for name in offloaded(get):
        if name in STASHED_MODULES:
            yield f"{MEGATRON}.offload_modules: '{name}' is covered by moe_paged_stash already. Remove it."
    if not model_shape(get).has_experts:
        yield f"{STASH}: needs layers with experts, and the model has none. Set it to false."
    if is_native(get) and "moe" in recomputed(get):
        yield f"{STASH}: experts save nothing while recompute_modules has 'moe'. Set it to false, or remove 'moe'."
    if is_native(get) and recompute(get)["recompute_granularity"] == "full":
        yield f"{STASH}: experts save nothing with recompute_granularity full. Set it to false, or recompute modules."


def _buffers_of_megatron(get: Get) -> Iterator[str]:
    if megatron(get, "moe_expert_rank_capacity_factor") is None or is_native(get):
        return
    backend = megatron(get, "moe_flex_dispatcher_backend")
    if backend not in ("hybridep", "ncclep"):
        yield f"{FACTOR}: needs moe_flex_dispatcher_backend hybridep or ncclep. Set one of them, or this to null."
    if backend == "hybridep" and not megatron(get, "use_transformer_engine_op_fuser"):
        yield f"{FACTOR}: needs use_transformer_engine_op_fuser with hybridep. Set that to true, or this to null."


def _buffers_of_torch_layers(get: Get) -> Iterator[str]:
    if megatron(get, "moe_expert_rank_capacity_factor") is None or not is_native(get):
        return
    if megatron(get, "transformer_impl") != "torch":
        yield f"{FACTOR}: only layers in torch have such buffers. Set transformer_impl to torch, or this to null."
    if megatron(get, "expert_model_parallel_size") > 1 and megatron(get, "moe_token_dispatcher_type") != "allgather":
        yield (
            f"{MEGATRON}.moe_token_dispatcher_type: with moe_expert_rank_capacity_factor, tokens reach the experts of "
            "other ranks by an all-gather. Set allgather."
        )
    if megatron(get, "moe_shared_expert_overlap"):
        yield f"{FACTOR}: cannot be combined with moe_shared_expert_overlap. Set that to null, or this to null."


STASH_RULES: tuple[Rule, ...] = (_paged_stash, _buffers_of_megatron, _buffers_of_torch_layers)
