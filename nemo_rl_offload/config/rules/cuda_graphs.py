"""Rules about CUDA graphs: Megatron-Core's, and what this project's engine adds."""

from collections.abc import Iterator

from nemo_rl_offload.config.rules.rule import (
    MEGATRON,
    Get,
    Rule,
    is_native,
    known_to_megatron,
    megatron,
    model_shape,
    offloaded,
    recompute,
    recomputed,
)
from nemo_rl_offload.errors import nearest
from nemo_rl_offload.specs.offload_modules import MOE_MODULES

IMPL = f"{MEGATRON}.cuda_graph_impl"
PARTS = f"{MEGATRON}.cuda_graph_modules"
CUDA_GRAPH_MODULES = ("attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba")
"""Megatron-Core's names for the parts of a layer that a CUDA graph captures."""


def _names(get: Get) -> Iterator[str]:
    for name in megatron(get, "cuda_graph_modules") or []:
        if name not in CUDA_GRAPH_MODULES:
            hint = nearest(name, CUDA_GRAPH_MODULES)
            yield f"{PARTS}: '{name}': unknown part.{hint} Allowed: {', '.join(CUDA_GRAPH_MODULES)}."


def _parts(get: Get) -> Iterator[str]:
    impl, parts = megatron(get, "cuda_graph_impl"), megatron(get, "cuda_graph_modules") or []
    if impl == "full_iteration" and parts:
        yield f"{PARTS}: cuda_graph_impl full_iteration captures everything. Set null."
    if impl not in ("local", "transformer_engine"):
        return
    if "moe_preprocess" in parts and "moe_router" not in parts and impl == "transformer_engine":
        yield f"{PARTS}: 'moe_preprocess' needs 'moe_router'. Add it."
    of_experts = [name for name in ("moe", "moe_router", "moe_preprocess") if name in parts]
    if not of_experts and "mlp" not in parts:
        return
    shape = model_shape(get)
    for name in of_experts:
        if not shape.has_experts:
            yield f"{PARTS}: '{name}' needs layers with experts, and the model has none. Remove it."
    if "moe" in parts and shape.has_experts:
        yield f"{PARTS}: 'moe' needs experts that drop and pad tokens, which no key turns on. Remove it."
    if "mlp" in parts and all(shape.layers_with_experts):
        yield f"{PARTS}: 'mlp' needs layers without experts, and the model has none. Remove it."


def _recompute(get: Get) -> Iterator[str]:
    impl, parts = megatron(get, "cuda_graph_impl"), megatron(get, "cuda_graph_modules") or []
    if recompute(get)["recompute_granularity"] == "full" and impl in ("local", "transformer_engine"):
        yield f"{IMPL}: full recompute works with full_iteration only. Set that or none."
    if impl == "transformer_engine" and "moe" in recomputed(get) and "moe_router" in parts:
        yield f"{PARTS}: 'moe_router' cannot be captured while recompute_modules has 'moe'. Remove one of the two."


def _offload(get: Get) -> Iterator[str]:
    impl, parts = megatron(get, "cuda_graph_impl"), megatron(get, "cuda_graph_modules") or []
    if megatron(get, "cpu_offloading") and impl in ("local", "transformer_engine"):
        yield f"{IMPL}: cannot be combined with cpu_offloading. Set none."
    if impl == "full_iteration" and is_native(get) and offloaded(get):
        yield (
            f"{IMPL}: full_iteration cannot be combined with engine: native, whose event queries and limits on bytes "
            "cannot be captured. Set none, or activation_offload.engine: megatron."
        )
    modules = known_to_megatron(get)
    if not modules or impl == "none":
        return
    if impl == "local":
        for name in modules:
            if name not in MOE_MODULES:
                yield f"{MEGATRON}.offload_modules: '{name}' cannot be offloaded with cuda_graph_impl local. Remove it."
        if not parts:
            yield f"{PARTS}: offloading with cuda_graph_impl local needs parts of layers. List some, like [attn]."
    if megatron(get, "cuda_graph_warmup_steps") == 0:
        yield f"{MEGATRON}.cuda_graph_warmup_steps: offloading needs a step before the capture. Set 1 or more."
    if impl == "full_iteration" and megatron(get, "fine_grained_offloading_max_inflight_offloads") is None:
        yield f"{MEGATRON}.fine_grained_offloading_max_inflight_offloads: full_iteration needs a limit. Set 0 or more."


CUDA_GRAPH_RULES: tuple[Rule, ...] = (_names, _parts, _recompute, _offload)


def _is_off(get: Get) -> Iterator[str]:
    if megatron(get, "cuda_graph_impl") != "none":
        return
    if megatron(get, "cuda_graph_modules"):
        yield f"{PARTS}: ignored with cuda_graph_impl none."
    if megatron(get, "delay_offload_until_cuda_graph"):
        yield f"{MEGATRON}.delay_offload_until_cuda_graph: ignored with cuda_graph_impl none."


CUDA_GRAPH_WARNINGS: tuple[Rule, ...] = (_is_off,)
