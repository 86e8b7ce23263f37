"""Megatron-Core's own rules about recomputation, experts, kernels and the optimizer.

Megatron checks them when its configuration objects are built, in a worker; here they are checked without importing it.
"""

from collections.abc import Iterator
from typing import Any

from nemo_rl_offload.config.rules.rule import (
    MEGATRON,
    Get,
    Rule,
    algorithm_has,
    algorithm_spec,
    have_transformer_engine,
    is_native,
    megatron,
    model_shape,
    recompute,
    recomputed,
)
from nemo_rl_offload.errors import nearest
from nemo_rl_offload.specs.offload_modules import COUNTED_RECOMPUTE, DENSE_MLP_RECOMPUTE
from nemo_rl_offload.specs.recompute import RECOMPUTE_KEYS

RECOMPUTE_MODULES = (
    "core_attn",
    "moe_act",
    "layernorm",
    "mla_up_proj",
    "mlp",
    "moe",
    "shared_experts",
    "gdn_norm_out",
    *DENSE_MLP_RECOMPUTE,
)
"""Megatron-Core's names for selective recomputation, and this project's."""

NEEDS_TRANSFORMER_ENGINE: dict[str, tuple[Any, ...]] = {
    "apply_rope_fusion": (True,),
    "moe_permute_fusion": (True,),
    "gradient_accumulation_fusion": (True,),
    "use_transformer_engine_op_fuser": (True,),
    "cpu_offloading": (True,),
    "cuda_graph_impl": ("transformer_engine",),
    "attention_backend": ("flash", "fused", "unfused", "local", "auto"),
    "optimizer.use_precision_aware_optimizer": (True,),
}
"""Keys and those of their values that only Transformer Engine can honor."""


def transformer_engine_settings(get: Get) -> list[str]:
    """The keys of `policy.megatron_cfg` whose values need Transformer Engine."""
    keys = [key for key, values in NEEDS_TRANSFORMER_ENGINE.items() if megatron(get, key) in values]
    if not is_native(get) and megatron(get, "fine_grained_activation_offloading"):
        keys.append("activation_offload.engine")
    return keys


def _torch_layers(get: Get) -> Iterator[str]:
    if megatron(get, "transformer_impl") != "torch":
        return
    for key in transformer_engine_settings(get):
        yield (
            f"{MEGATRON}.{key}: {megatron(get, key)} needs Transformer Engine, which transformer_impl: torch "
            "leaves out. Change one of the two."
        )


def transformer_engine_is_here(get: Get) -> Iterator[str]:
    """A rule about this machine: Transformer Engine is installed where something needs it."""
    impl = megatron(get, "transformer_impl")
    if impl == "torch" or have_transformer_engine():
        return
    if impl == "transformer_engine":
        yield f"{MEGATRON}.transformer_impl: transformer_engine is not installed here. Install it, or set torch."
    for key in transformer_engine_settings(get):
        yield f"{MEGATRON}.{key}: {megatron(get, key)} needs Transformer Engine, which is not installed here."


def _recompute(get: Get) -> Iterator[str]:
    settings = recompute(get)
    granularity, num_layers = settings["recompute_granularity"], settings["recompute_num_layers"]
    if granularity == "full" and settings["recompute_method"] is None:
        yield f"{MEGATRON}.recompute_method: full recompute needs it. Set uniform or block."
    if granularity == "full" and num_layers is None:
        yield f"{MEGATRON}.recompute_num_layers: full recompute needs it. Set 1 or more."
    if granularity == "selective" and num_layers is not None and set(recomputed(get)).isdisjoint(COUNTED_RECOMPUTE):
        yield (
            f"{MEGATRON}.recompute_num_layers: selective recompute covers all layers but with "
            f"{' or '.join(COUNTED_RECOMPUTE)} in recompute_modules. Set null, or list one of them."
        )


def _recompute_of_further_tokens(get: Get) -> Iterator[str]:
    """Megatron-Core asserts this at the first training step."""
    settings = recompute(get)
    num_layers = settings["recompute_num_layers"]
    is_uniform = settings["recompute_granularity"] == "full" and settings["recompute_method"] == "uniform"
    if is_uniform and num_layers not in (None, 1) and model_shape(get).predicts_further_tokens:
        yield (
            f"{MEGATRON}.recompute_num_layers: {num_layers} is not allowed with recompute_method uniform and a model "
            "with multi-token prediction, whose layers are recomputed one at a time. Set 1."
        )


def _recompute_names(get: Get) -> Iterator[str]:
    path = f"{MEGATRON}.recompute_modules"
    for name in megatron(get, "recompute_modules") or []:
        if name not in RECOMPUTE_MODULES:
            hint = nearest(name, RECOMPUTE_MODULES)
            yield f"{path}: '{name}': unknown module.{hint} Allowed: {', '.join(RECOMPUTE_MODULES)}."


def _recompute_fits_model(get: Get) -> Iterator[str]:
    names = recomputed(get)
    if names == ["core_attn"]:
        return
    shape = model_shape(get)
    present = {
        "experts": (("moe_act", "moe"), shape.has_experts),
        "shared experts": (("shared_experts",), shape.has_shared_experts),
        "latent attention": (("mla_up_proj",), shape.has_latent_attention),
        "linear attention": (("gdn_norm_out",), shape.has_linear_attention),
        "layers without experts": (DENSE_MLP_RECOMPUTE, not all(shape.layers_with_experts)),
    }
    for part, (of_part, is_present) in present.items():
        for name in names:
            if name in of_part and not is_present:
                yield f"{MEGATRON}.recompute_modules: '{name}' needs {part}, and the model has none. Remove it."
    if "shared_experts" in names and megatron(get, "moe_shared_expert_overlap"):
        yield (
            f"{MEGATRON}.recompute_modules: 'shared_experts' cannot be recomputed with moe_shared_expert_overlap. "
            "Change one of the two."
        )


def _experts(get: Get) -> Iterator[str]:
    dispatcher = megatron(get, "moe_token_dispatcher_type")
    if megatron(get, "moe_shared_expert_overlap") and dispatcher == "allgather":
        yield f"{MEGATRON}.moe_shared_expert_overlap: needs moe_token_dispatcher_type alltoall or flex. Change one."
    if megatron(get, "moe_flex_dispatcher_backend") is not None and dispatcher != "flex":
        yield f"{MEGATRON}.moe_flex_dispatcher_backend: needs moe_token_dispatcher_type flex. Set that, or null."
    loss = megatron(get, "moe_aux_loss_coeff")
    if megatron(get, "moe_router_load_balancing_type") == "sinkhorn" and loss != 0:
        yield f"{MEGATRON}.moe_aux_loss_coeff: sinkhorn balances without a loss. Set it to 0."


def _bias_activation_fusion(get: Get) -> Iterator[str]:
    if not megatron(get, "bias_activation_fusion"):
        return
    activation = model_shape(get).activation
    if activation not in (None, "silu"):
        yield f"{MEGATRON}.bias_activation_fusion: not for the activation {activation} of the model. Set false."


def _learning_rate(get: Get) -> Iterator[str]:
    path = f"{MEGATRON}.optimizer"
    highest = get(f"{path}.lr")
    for lower in (f"{path}.min_lr", f"{MEGATRON}.scheduler.lr_warmup_init"):
        if get(lower) > highest:
            yield f"{lower}: {get(lower)} is above optimizer.lr {highest}. Lower it."


def _weight_decay(get: Get) -> Iterator[str]:
    path = f"{MEGATRON}.scheduler"
    plain = get(f"{MEGATRON}.optimizer.weight_decay")
    start, end = (plain if (value := get(f"{path}.{key}_weight_decay")) is None else value for key in ("start", "end"))
    if end < start:
        yield f"{path}.end_weight_decay: {end} is below start_weight_decay {start}. Raise it."
    elif start != end and get(f"{path}.weight_decay_incr_style") == "constant":
        yield f"{path}.weight_decay_incr_style: weight decay goes from {start} to {end}. Set linear or cosine."


def _num_updates(get: Get) -> int:
    """Optimizer steps of the whole run; where passes over the data end it before, more than there are."""
    spec, of_step = algorithm_spec(get), 1
    algorithm = spec.name
    if spec.generates:
        prompts, generations = (get(f"{algorithm}.num_{key}") for key in ("prompts_per_step", "generations_per_prompt"))
        of_step = max(1, prompts * generations // get("policy.train_global_batch_size"))
    if algorithm_has("ppo_epochs", get):
        of_step *= get(f"{algorithm}.ppo_epochs")
    return int(get(f"{algorithm}.max_num_steps") * of_step)


def _warmup(get: Get) -> Iterator[str]:
    path = f"{MEGATRON}.scheduler"
    warmup = get(f"{path}.lr_warmup_iters")
    decay = get(f"{path}.lr_decay_iters") or _num_updates(get)
    if get(f"{path}.lr_decay_style") != "constant" and warmup >= decay:
        yield (
            f"{path}.lr_warmup_iters: {warmup} is not below lr_decay_iters, {decay} (null: updates of the run). "
            "Lower it."
        )


def _distributed_optimizer(get: Get) -> Iterator[str]:
    path = f"{MEGATRON}.optimizer"
    if get(f"{path}.use_distributed_optimizer") and get(f"{path}.optimizer") != "adam":
        yield f"{path}.use_distributed_optimizer: Megatron-Core splits adam alone. Set it to false, or optimizer: adam."


def _precision_aware_optimizer(get: Get) -> Iterator[str]:
    path = f"{MEGATRON}.optimizer"
    if get(f"{path}.use_precision_aware_optimizer") and not get(f"{path}.use_distributed_optimizer"):
        yield f"{path}.use_precision_aware_optimizer: needs use_distributed_optimizer. Turn that on, or this off."


def _overlap(get: Get) -> Iterator[str]:
    ddp = f"{MEGATRON}.distributed_data_parallel_config"
    if not get(f"{ddp}.overlap_param_gather"):
        return
    for needed in (f"{MEGATRON}.optimizer.use_distributed_optimizer", f"{ddp}.overlap_grad_reduce"):
        if not get(needed):
            yield f"{ddp}.overlap_param_gather: needs {needed}. Set that to true, or this to false."


MEGATRON_RULES: tuple[Rule, ...] = (
    _torch_layers,
    _recompute,
    _recompute_of_further_tokens,
    _recompute_names,
    _recompute_fits_model,
    _experts,
    _bias_activation_fusion,
    _learning_rate,
    _weight_decay,
    _warmup,
    _distributed_optimizer,
    _precision_aware_optimizer,
    _overlap,
)


def _recompute_is_off(get: Get) -> Iterator[str]:
    if megatron(get, "activation_checkpointing") is False:
        for key in RECOMPUTE_KEYS:
            if megatron(get, key) is not None:
                yield f"{MEGATRON}.{key}: ignored with activation_checkpointing false."
        return
    unused = {None: ("modules", "method", "num_layers"), "selective": ("method",), "full": ("modules",)}
    granularity = recompute(get)["recompute_granularity"]
    for key in unused[granularity]:
        if megatron(get, f"recompute_{key}") is not None:
            yield f"{MEGATRON}.recompute_{key}: ignored with recompute_granularity {granularity or 'null'}."


def _recompute_skips_further_tokens(get: Get) -> Iterator[str]:
    settings = recompute(get)
    is_block = settings["recompute_granularity"] == "full" and settings["recompute_method"] == "block"
    if is_block and model_shape(get).predicts_further_tokens:
        yield (
            f"{MEGATRON}.recompute_method: block leaves out the layers of multi-token prediction. To recompute them "
            "too, set uniform, with recompute_num_layers 1."
        )


def _warmup_never_ends(get: Get) -> Iterator[str]:
    path, num_updates = f"{MEGATRON}.scheduler.lr_warmup_iters", _num_updates(get)
    if get(path) >= num_updates and not any(_warmup(get)):
        yield (
            f"{path}: {get(path)} is not below {num_updates}, the updates of the run, so that optimizer.lr is never "
            "reached. Lower it."
        )


def _no_experts(get: Get) -> Iterator[str]:
    names = (
        "router_dtype",
        "router_load_balancing_type",
        "router_bias_update_rate",
        "aux_loss_coeff",
        "permute_fusion",
    )
    keys = [f"moe_{name}" for name in (*names, "shared_expert_overlap")]
    given = [key for key in keys if megatron(get, key) is not None]
    given += [name for name in ("freeze_moe_router", "moe_per_layer_logging") if megatron(get, name)]
    given += ["moe_token_dispatcher_type"] if megatron(get, "moe_token_dispatcher_type") == "allgather" else []
    if given and not model_shape(get).has_experts:
        yield from (f"{MEGATRON}.{key}: ignored, because the model has no experts." for key in given)


MEGATRON_WARNINGS: tuple[Rule, ...] = (
    _recompute_is_off,
    _recompute_skips_further_tokens,
    _warmup_never_ends,
    _no_experts,
)
