"""Rules about what is offloaded, recomputed and kept in pages instead: by which engine, of which modules, beside what.

Offloading comes first, then recomputing parts of dense MLPs, which this project does itself; then the two side by side:
what a recomputed module saves, and whether that stays where it is. Last are the experts' buffers of fixed size and
their paged stash.
"""

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
from nemo_rl_offload.errors import ConfigError, nearest
from nemo_rl_offload.specs.offload_modules import (
    COUNTED_RECOMPUTE,
    DENSE_MLP_MODULES,
    DENSE_MLP_RECOMPUTE,
    MEGATRON_MODULES,
    MOE_MODULES,
    NATIVE_MODULES,
    STASHED_MODULES,
    SUPPORTED_MODULES,
    TRANSFORMER_ENGINE_MODULES,
    discarded_by_recompute,
    fused_norms,
)
from nemo_rl_offload.units import parse_bytes

PATH = f"{MEGATRON}.offload_modules"
RECOMPUTE = f"{MEGATRON}.recompute_modules"
STASH = f"{MEGATRON}.moe_paged_stash"
FACTOR = f"{MEGATRON}.moe_expert_rank_capacity_factor"
SWITCH = "fine_grained_activation_offloading"


def module_names(get: Get) -> Iterator[str]:
    """Names that are none, are not the engine's, or stand twice or alone."""
    modules = megatron(get, "offload_modules")
    if not isinstance(modules, list):
        return
    allowed, other = (SUPPORTED_MODULES, "megatron") if is_native(get) else (MEGATRON_MODULES, "native")
    for name in dict.fromkeys(modules):
        if name in allowed:
            continue
        if name in (*NATIVE_MODULES, *MEGATRON_MODULES):
            reason = f"only engine: {other} can offload it."
        elif name == "auto":
            yield f"{PATH}: 'auto' chooses among all modules, and stands alone. Write it so, or remove it."
            continue
        else:
            reason = f"unknown module.{nearest(name, allowed)}"
        yield f"{PATH}: '{name}': {reason} Allowed: {', '.join(allowed)}."
    for name in sorted({name for name in modules if modules.count(name) > 1}):
        yield f"{PATH}: '{name}' is listed more than once. List it once."
    if "attn_proj" in modules and "core_attn" not in modules:
        yield f"{PATH}: 'attn_proj' needs 'core_attn'. Add core_attn, or remove attn_proj."


def _needs_modules(get: Get) -> Iterator[str]:
    if megatron(get, SWITCH) and not megatron(get, "offload_modules"):
        yield (
            f"{PATH}: empty, but {SWITCH} is true. "
            "List modules, like [core_attn, mlp_norm], set auto, or turn offloading off."
        )


def _auto(get: Get) -> Iterator[str]:
    if megatron(get, "offload_modules") != "auto":
        return
    if not is_native(get):
        yield f"{PATH}: 'auto' needs engine: native. List modules, or change activation_offload.engine."
    if megatron(get, "activation_offload.gpu_memory_budget") is None:
        yield f"{MEGATRON}.activation_offload.gpu_memory_budget: 'auto' needs it. Set a size, like \"72GiB\"."
    for key, default in (("activation_offload_fraction", 1), ("delta_offload_bytes_across_pp_ranks", 0)):
        if megatron(get, key) != default:
            yield f"{MEGATRON}.{key}: excluded by offload_modules: auto, which chooses itself. Set {default}."


def _fits_model(get: Get) -> Iterator[str]:
    modules = offloaded(get)
    if not modules:
        return
    shape = model_shape(get)
    for name in modules:
        if name in MOE_MODULES and not shape.has_experts:
            yield f"{PATH}: '{name}' needs layers with experts, and the model has none. Remove it."
        if name in DENSE_MLP_MODULES and not shape.has_dense_layers:
            yield f"{PATH}: '{name}' needs layers without experts, and the model has none. Remove it."
    if "shared_experts" in modules and shape.has_experts and not shape.has_shared_experts:
        yield f"{PATH}: 'shared_experts' needs shared experts, and the model has none. Remove it."
    if "shared_experts" in modules and megatron(get, "moe_shared_expert_overlap"):
        yield f"{PATH}: 'shared_experts' cannot be offloaded with moe_shared_expert_overlap. Change one of the two."


def _fused_group_mlp(get: Get) -> Iterator[str]:
    modules = megatron(get, "offload_modules") or []
    if "fused_group_mlp" not in modules:
        return
    if not megatron(get, "use_transformer_engine_op_fuser"):
        yield (
            f"{PATH}: 'fused_group_mlp' needs Transformer Engine's op fuser. "
            "Set use_transformer_engine_op_fuser to true, or remove it."
        )
    if parts := [name for name in ("expert_fc1", "moe_act") if name in modules]:
        yield f"{PATH}: 'fused_group_mlp' covers {' and '.join(parts)} already. Remove one or the other."


def _fused_norms(get: Get) -> list[str]:
    """As `fused_norms` has them; where whole layers are recomputed, `attn_norm` is a layer's input."""
    shape = model_shape(get)
    is_layers_input = is_native(get) and recompute(get)["recompute_granularity"] == "full"
    return fused_norms(shape.has_latent_attention or is_layers_input, shape.has_experts)


def _transformer_engines_layers(get: Get) -> Iterator[str]:
    names = offloaded(get)
    if not names or megatron(get, "transformer_impl") != "transformer_engine":
        return
    fused = _fused_norms(get)
    for name in names:
        if name in fused:
            yield (
                f"{PATH}: '{name}' has no boundary of its own in Transformer Engine's fused norm and linear layers. "
                "Remove it, or set transformer_impl: torch."
            )
        if name not in TRANSFORMER_ENGINE_MODULES and is_native(get):
            yield f"{PATH}: '{name}' can be offloaded with transformer_impl: torch alone. Remove it, or set that."


def _cpu_offloading(get: Get) -> Iterator[str]:
    path = f"{MEGATRON}.cpu_offloading"
    if not megatron(get, "cpu_offloading"):
        return
    on = [key for key in (SWITCH, "moe_paged_stash") if megatron(get, key)]
    if recompute(get)["recompute_granularity"]:
        on.append("recompute_granularity" if megatron(get, "recompute_granularity") else "activation_checkpointing")
    for key in on:
        off = "null" if key == "recompute_granularity" else "false"
        yield f"{path}: cannot be combined with {key}. Set cpu_offloading to false, or {key} to {off}."
    if megatron(get, "pipeline_model_parallel_size") > 1:
        yield f"{path}: cannot be combined with pipeline parallelism. Set it to false."
    num_covered, num_layers = megatron(get, "cpu_offloading_num_layers"), len(model_shape(get).layers_with_experts)
    if num_covered >= num_layers:
        yield f"{path}_num_layers: {num_covered} must be below the model's {num_layers} layers. Lower it."


def _sizes(get: Get) -> Iterator[str]:
    alternatives = {"gpu_memory_budget": "", "host_memory_budget": " Or give a share of the node's free memory."}
    for key, alternative in alternatives.items():
        path = f"{MEGATRON}.activation_offload.{key}"
        size = get(path)
        try:
            if isinstance(size, str):
                parse_bytes(size)
        except ConfigError as error:
            yield f"{path}: {error}{alternative}"


def _is_off(get: Get) -> Iterator[str]:
    if megatron(get, SWITCH):
        return
    if megatron(get, "offload_modules"):
        yield f"{PATH}: ignored, because {SWITCH} is not true. Set that to true to offload."


def _budget_is_unused(get: Get) -> Iterator[str]:
    path = f"{MEGATRON}.activation_offload.gpu_memory_budget"
    if get(path) is not None and megatron(get, "offload_modules") != "auto":
        yield f"{path}: ignored, because only offload_modules: auto reads it."


def _norms_and_auto_layers(get: Get) -> Iterator[str]:
    if megatron(get, "transformer_impl") != "auto" or not offloaded(get):
        return
    fused = _fused_norms(get)
    if names := [name for name in offloaded(get) if name in fused]:
        yield (
            f"{PATH}: {' and '.join(names)} may not be offloadable where transformer_impl: auto finds Transformer "
            "Engine, which fuses norms into linear layers. Set transformer_impl: torch to be sure."
        )


def _dense_mlps_elsewhere(get: Get) -> Iterator[str]:
    names = [name for name in recomputed(get) if name in DENSE_MLP_RECOMPUTE]
    if not names:
        return
    if megatron(get, "fine_grained_activation_offloading") and not is_native(get):
        yield f"{RECOMPUTE}: '{names[0]}' needs activation_offload.engine native. Set that, or remove it."
    if megatron(get, "use_transformer_engine_op_fuser"):
        yield (
            f"{RECOMPUTE}: '{names[0]}' cannot be recomputed with use_transformer_engine_op_fuser. "
            "Change one of the two."
        )
    if megatron(get, "fp8_cfg.enabled"):
        yield f"{RECOMPUTE}: '{names[0]}' cannot be recomputed in 8 bits. Remove it, or set fp8_cfg.enabled to false."


def _mlp_twice(get: Get) -> Iterator[str]:
    if set(COUNTED_RECOMPUTE) <= set(recomputed(get)):
        yield f"{RECOMPUTE}: 'mlp' contains 'mlp_fc1'. Remove one of the two."


def _mlp_act_is_covered(get: Get) -> Iterator[str]:
    names = recomputed(get)
    whole = next((name for name in COUNTED_RECOMPUTE if name in names), None)
    if whole and "mlp_act" in names and recompute(get)["recompute_num_layers"] is None:
        yield (
            f"{RECOMPUTE}: 'mlp_act' changes nothing: '{whole}' contains it and covers all layers. Set "
            f"recompute_num_layers to the number of layers that '{whole}' is for, or remove one of the two."
        )


def _within_recomputed_experts(get: Get) -> Iterator[str]:
    if "moe" not in recomputed(get):
        return
    for name in offloaded(get):
        if name in MOE_MODULES:
            yield f"{PATH}: '{name}' saves nothing while recompute_modules has 'moe'. Remove one of the two."


def _discarded_by_recompute(get: Get) -> Iterator[str]:
    names, covered = offloaded(get), recomputed(get)
    for part, modules in discarded_by_recompute(model_shape(get).has_latent_attention).items():
        for name in modules:
            if part in covered and name in names:
                yield f"{PATH}: '{name}' saves what recompute_modules '{part}' discards. Remove one of the two."


def _within_recomputed_layers(get: Get) -> Iterator[str]:
    settings = recompute(get)
    if settings["recompute_granularity"] != "full" or not is_native(get):
        return
    if settings["recompute_method"] == "block":
        ranks = megatron(get, "pipeline_model_parallel_size")
        layers = len(model_shape(get).layers_with_experts)
        num_layers = settings["recompute_num_layers"]
        if num_layers is None or num_layers * ranks < layers:
            return  # the other layers save as usual
    for name in offloaded(get):
        if name != "attn_norm":
            yield (
                f"{PATH}: '{name}' saves nothing: with recompute_granularity full, a layer saves its input alone, "
                "which is offloaded as attn_norm."
            )


def _within_recomputed_modules(get: Get) -> Iterator[str]:
    names, covered = offloaded(get), recomputed(get)
    is_torch = megatron(get, "transformer_impl") == "torch"
    nothing_from: dict[str, tuple[str, ...]] = {
        "core_attn": ("core_attn",),
        "shared_experts": ("shared_experts",),
    }
    if recompute(get)["recompute_num_layers"] is None:
        of_mlp = DENSE_MLP_MODULES if is_torch else ("mlp_act",)  # the input is mlp_norm's, or mlp_fc1's
        nothing_from.update(dict.fromkeys(COUNTED_RECOMPUTE, of_mlp))
    for part, silent in nothing_from.items():
        for name in names:
            if part in covered and name in silent:
                yield f"{PATH}: '{name}' saves nothing while recompute_modules has '{part}'."


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
    dispatcher = megatron(get, "moe_token_dispatcher_type")
    are_shared = any(megatron(get, f"expert_{name}_parallel_size") > 1 for name in ("model", "tensor"))
    if dispatcher == "flex" or (dispatcher != "allgather" and are_shared):
        yield (
            f"{MEGATRON}.moe_token_dispatcher_type: with moe_expert_rank_capacity_factor, tokens reach the experts of "
            "other ranks by an all-gather. Set allgather."
        )
    if megatron(get, "moe_shared_expert_overlap"):
        yield f"{FACTOR}: cannot be combined with moe_shared_expert_overlap. Set that to null, or this to null."


OFFLOAD_RULES: tuple[Rule, ...] = (
    module_names,
    _needs_modules,
    _auto,
    _fits_model,
    _fused_group_mlp,
    _transformer_engines_layers,
    _cpu_offloading,
    _sizes,
    _dense_mlps_elsewhere,
    _mlp_twice,
    _within_recomputed_experts,
    _discarded_by_recompute,
)
STASH_RULES: tuple[Rule, ...] = (
    _paged_stash,
    _buffers_of_megatron,
    _buffers_of_torch_layers,
)
OFFLOAD_WARNINGS: tuple[Rule, ...] = (
    _is_off,
    _budget_is_unused,
    _norms_and_auto_layers,
    _mlp_act_is_covered,
    _within_recomputed_layers,
    _within_recomputed_modules,
)
