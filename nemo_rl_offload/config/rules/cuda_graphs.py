"""Rules about CUDA graphs of layers in training: who captures which parts, and beside what.

A graph is what a layer did once, with the same shapes, addresses and decisions. What changes those from microbatch to
microbatch, or from step to step, is refused here; so is what nobody has tried inside of a graph.
"""

import json
from collections.abc import Iterator
from typing import Any

from nemo_rl_offload.config.rules.rule import (
    MEGATRON,
    Get,
    Rule,
    megatron,
    model_content,
    model_shape,
    offloaded,
    recompute,
    recomputed,
)
from nemo_rl_offload.config.rules.vllm import is_used as uses_vllm
from nemo_rl_offload.errors import ConfigError, nearest
from nemo_rl_offload.specs.offload_modules import CAPTURED_WITHIN

GRAPH = f"{MEGATRON}.cuda_graph_impl"
PARTS = f"{MEGATRON}.cuda_graph_modules"
CUDA_GRAPH_MODULES = ("attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba")
"""Megatron-Core's names for the parts of a layer that a CUDA graph captures."""
OF_EXPERTS = ("moe", "moe_router", "moe_preprocess")

_NOT_CAPTURED_BY = {
    "local": (
        "CUDA graphs by Megatron-Core's own runner",
        "it captures whatever the first step had, and fails on a microbatch of another shape",
    ),
    "full_iteration": (
        "a CUDA graph of a whole iteration",
        "losses and metrics are read on the host, and batches have changing shapes",
    ),
}
_BESIDE: tuple[tuple[str, Any, str], ...] = (
    ("pipeline_model_parallel_size", 1, "microbatches of several stages are under way at once, and a graph holds one"),
    ("context_parallel_size", 1, "nobody has tried what ranks send each other within a graph"),
    ("distributed_data_parallel_config.overlap_param_gather", False, "a replay waits for no weights"),
    ("fp8_cfg.enabled", False, "weights in 8 bits are made anew in each step, at other addresses"),
    ("peft.enabled", False, "nobody has tried it"),
    ("use_transformer_engine_op_fuser", None, "nobody has tried it"),
    (
        "gradient_accumulation_fusion",
        None,
        "a graph adds to gradients where they were, and they move",
    ),
    ("moe_paged_stash", False, "a replay puts nothing into it"),
    ("cpu_offloading", False, "a replay moves nothing"),
)
"""Keys of `policy.megatron_cfg`, the value that is allowed (or what is as good as it), and why no other is."""
_OVERRIDES = (
    *("fp32_residual_connection", "overlap_moe_expert_parallel_comm", "moe_input_jitter_eps"),
    *("moe_router_force_load_balancing", "moe_expert_capacity_factor", "tp_comm_overlap", "use_te_rng_tracker"),
)
"""Fields in `model_overrides` with which what a layer is given, or when, is unlike what Megatron-Core captures."""
_RECOMPUTED_WITHIN = {
    "attn": ("core_attn", "mla_up_proj", "layernorm"),
    "mlp": ("mlp", "mlp_fc1", "mlp_act", "layernorm"),
    "moe_router": ("moe", "shared_experts", "layernorm"),
}


def is_on(get: Get) -> bool:
    """Whether layers are captured."""
    return bool(megatron(get, "cuda_graph_impl") == "transformer_engine")


def captured(get: Get) -> list[str]:
    """The parts of layers that are; a whole layer has attention and an MLP."""
    return list(megatron(get, "cuda_graph_modules") or ("attn", "mlp")) if is_on(get) else []


def _refused(path: str, value: object, feature: str, why: str, fix: str) -> str:
    return f"{path}: {value} asks for {feature}, not supported here: {why}. {fix}"


def _who_captures(get: Get) -> Iterator[str]:
    if (impl := megatron(get, "cuda_graph_impl")) in _NOT_CAPTURED_BY:
        yield _refused(GRAPH, impl, *_NOT_CAPTURED_BY[impl], "Set transformer_engine, or none.")


def _names(get: Get) -> Iterator[str]:
    for name in megatron(get, "cuda_graph_modules") or []:
        if name not in CUDA_GRAPH_MODULES:
            hint = nearest(name, CUDA_GRAPH_MODULES)
            yield f"{PARTS}: '{name}': unknown part.{hint} Allowed: {', '.join(CUDA_GRAPH_MODULES)}."


def _fit_the_model(get: Get) -> Iterator[str]:
    if not is_on(get):
        return
    parts, shape = megatron(get, "cuda_graph_modules") or [], model_shape(get)
    if shape.has_states or "mamba" in parts:
        why = "their kernels here are no part of what Megatron-Core captures"
        yield _refused(GRAPH, "transformer_engine", "CUDA graphs of layers with states", why, "Set none.")
        return
    if shape.predicts_further_tokens:
        why = "nobody has tried it"
        fix = "Set mtp_num_layers to 0, or this to none."
        yield _refused(GRAPH, "transformer_engine", "CUDA graphs of layers for further tokens", why, fix)
    if not parts and shape.has_experts:
        yield (
            f"{PARTS}: null captures whole layers, and the model has layers with experts, which get other numbers of "
            "tokens each time. List parts, such as [attn, moe_router, moe_preprocess]."
        )
    for name in [name for name in OF_EXPERTS if name in parts]:
        if not shape.has_experts:
            yield f"{PARTS}: '{name}' needs layers with experts, and the model has none. Remove it."
    if "moe" in parts and shape.has_experts:
        yield f"{PARTS}: 'moe' needs experts that drop and pad tokens, which no key turns on. Remove it."
    if "mlp" in parts and not shape.has_dense_layers:
        yield f"{PARTS}: 'mlp' needs layers without experts, and the model has none. Remove it."


def _attention(get: Get) -> Iterator[str]:
    if "attn" not in captured(get):
        return
    whole = not megatron(get, "cuda_graph_modules")
    value, fix = ("null", "List parts without attn") if whole else ("'attn'", "Remove it")
    if get("policy.sequence_packing.enabled"):
        why = "where a pack's sequences end is not the same twice"
        fix_of_packs = f"{fix}, or set policy.sequence_packing.enabled to false."
        yield _refused(PARTS, value, "CUDA graphs of attention over packs", why, fix_of_packs)
    if model_shape(get).has_latent_attention:
        why = "it looks its positions up where a cache may have dropped them"
        yield _refused(PARTS, value, "CUDA graphs of latent attention", why, f"{fix}.")
    if (kind := _rope_type(get)) in ("yarn", "longrope"):
        yield _refused(PARTS, value, f"CUDA graphs of attention with {kind}", "nobody has tried it", f"{fix}.")


def _rope_type(get: Get) -> object:
    try:
        content = model_content(get)
    except ConfigError:  # which another rule reports
        return None
    rope = content.get("rope_parameters") or content.get("rope_scaling") or {}
    return rope.get("rope_type", rope.get("type"))


def _experts(get: Get) -> Iterator[str]:
    parts = captured(get)
    if "moe_preprocess" in parts and "moe_router" not in parts:
        yield f"{PARTS}: 'moe_preprocess' needs 'moe_router'. Add it."
    if "moe_router" not in parts or not (shape := model_shape(get)).has_experts:
        return
    if (kind := megatron(get, "moe_router_load_balancing_type")) in ("sinkhorn", "global_aux_loss"):
        why = "it counts until it is even, on the host" if kind == "sinkhorn" else "ranks would wait for each other"
        fix = f"Remove it, or set moe_router_load_balancing_type to another than {kind}."
        yield _refused(PARTS, "'moe_router'", f"CUDA graphs of routers with {kind}", why, fix)
    if get("policy.router_replay.enabled"):
        why = "a replay would choose the experts of another batch"
        fix = "Remove it, or set policy.router_replay.enabled to false."
        yield _refused(PARTS, "'moe_router'", "CUDA graphs of routers that replay", why, fix)
    if shape.has_shared_experts and megatron(get, "moe_shared_expert_overlap") is not False:
        yield (
            f"{MEGATRON}.moe_shared_expert_overlap: nobody has tried shared experts on a stream of their own beside a "
            "captured router. Set it to false."
        )
    if "moe_preprocess" in parts:
        yield from _preprocessing(get)


def _preprocessing(get: Get) -> Iterator[str]:
    if not megatron(get, "moe_permute_fusion"):
        yield f"{PARTS}: 'moe_preprocess' needs moe_permute_fusion, without which the host counts. Set that to true."
    if megatron(get, "moe_token_dispatcher_type") == "flex":
        yield f"{PARTS}: 'moe_preprocess' cannot be captured with moe_token_dispatcher_type flex. Remove it."
    for key in ("expert_model_parallel_size", "expert_tensor_parallel_size"):
        if (size := megatron(get, key)) > 1:
            yield (
                f"{PARTS}: 'moe_preprocess' waits for the ranks that share the experts ({key} {size}), which have "
                "microbatches of other shapes. Remove it."
            )


def _beside(get: Get) -> Iterator[str]:
    if not is_on(get):
        return
    for key, allowed, why in _BESIDE:
        if (value := megatron(get, key)) != allowed and value:
            yield (
                f"{MEGATRON}.{key}: {json.dumps(value)} cannot be combined with {GRAPH}: {why}. Set it to "
                f"{json.dumps(allowed)}, or that to none."
            )
    if get("policy.precision") != "bfloat16":
        yield f"policy.precision: {GRAPH} captures layers in bfloat16 alone. Set that, or cuda_graph_impl to none."
    if get("policy.quant_cfg") is not None:
        yield f"policy.quant_cfg: nobody has tried it with {GRAPH}. Set it to null, or that to none."
    if uses_vllm(get) and get("policy.generation.colocated.enabled"):
        yield (
            f"policy.generation.colocated.enabled: weights may leave the GPUs while vLLM generates there, and {GRAPH} "
            "reads them where they were. Set it to false, or that to none."
        )
    if megatron(get, "cuda_graph_warmup_steps") == 0:
        yield f"{MEGATRON}.cuda_graph_warmup_steps: a capture needs steps before it. Set 1 or more."
    for name in _OVERRIDES:
        if name in megatron(get, "model_overrides"):
            yield f"{MEGATRON}.model_overrides.{name}: cannot be combined with {GRAPH}. Remove it, or set that to none."


def _recompute(get: Get) -> Iterator[str]:
    if not is_on(get):
        return
    if recompute(get)["recompute_granularity"] == "full":
        yield f"{GRAPH}: a recomputed layer cannot be captured. Set none, or recompute modules that are not captured."
        return
    parts = captured(get)
    for name in recomputed(get):
        if part := next((part for part in parts if name in _RECOMPUTED_WITHIN.get(part, ())), None):
            yield (
                f"{MEGATRON}.recompute_modules: '{name}' is recomputed within '{part}' of cuda_graph_modules, which "
                "nobody has tried. Remove one of the two."
            )


def _offload(get: Get) -> Iterator[str]:
    """A capture cannot include what is offloaded: a replay would copy to and from the same host memory each time."""
    if not is_on(get):
        return
    path = f"{MEGATRON}.offload_modules"
    if megatron(get, "fine_grained_activation_offloading") and megatron(get, "offload_modules") == "auto":
        yield f"{path}: 'auto' chooses among modules that {GRAPH} captures as well. List modules, or set that to none."
    parts = captured(get)
    for name in offloaded(get):
        if part := next((part for part in parts if part in CAPTURED_WITHIN.get(name, ())), None):
            whole = "whole layers are captured" if not megatron(get, "cuda_graph_modules") else f"'{part}' is captured"
            yield f"{path}: '{name}' cannot be offloaded: {whole}, with what it saves. Remove it, or change {PARTS}."


def _are_off(get: Get) -> Iterator[str]:
    if megatron(get, "cuda_graph_impl") != "none":
        return
    if megatron(get, "cuda_graph_modules"):
        yield f"{PARTS}: ignored with cuda_graph_impl none."
    if megatron(get, "delay_offload_until_cuda_graph"):
        yield f"{MEGATRON}.delay_offload_until_cuda_graph: ignored with cuda_graph_impl none."


CUDA_GRAPH_RULES: tuple[Rule, ...] = (
    _who_captures,
    _names,
    _fit_the_model,
    _attention,
    _experts,
    _beside,
    _recompute,
    _offload,
)
CUDA_GRAPH_WARNINGS: tuple[Rule, ...] = (_are_off,)
