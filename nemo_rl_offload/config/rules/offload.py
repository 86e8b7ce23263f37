"""Rules about what is offloaded: by which engine, which modules of the model, and what it excludes."""

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
)
from nemo_rl_offload.errors import ConfigError, nearest
from nemo_rl_offload.specs.offload_modules import (
    DENSE_MLP_MODULES,
    MEGATRON_MODULES,
    MOE_MODULES,
    NATIVE_MODULES,
    SUPPORTED_MODULES,
    TRANSFORMER_ENGINE_MODULES,
    fused_norms,
)
from nemo_rl_offload.units import parse_bytes

PATH = f"{MEGATRON}.offload_modules"
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
        if name in DENSE_MLP_MODULES and all(shape.layers_with_experts):
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


OFFLOAD_RULES: tuple[Rule, ...] = (
    module_names,
    _needs_modules,
    _auto,
    _fits_model,
    _fused_group_mlp,
    _transformer_engines_layers,
    _cpu_offloading,
    _sizes,
)


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


OFFLOAD_WARNINGS: tuple[Rule, ...] = (_is_off, _budget_is_unused, _norms_and_auto_layers)
