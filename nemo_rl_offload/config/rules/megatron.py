"""Megatron-Core's own rules: recomputation, experts, kernels, the optimizer, and its fields by name.

Megatron checks them when its configuration objects are built, in a worker; here they are checked without importing it,
which takes seconds. Its field names and their types are read from its sources. What a field in `model_overrides` means
together with others is Megatron's own to check, when its objects are built; a warning says where that can happen.
"""

import ast
import json
import typing
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from nemo_rl_offload.config.rules.rule import (
    MEGATRON,
    Get,
    Rule,
    algorithm_has,
    algorithm_spec,
    flex_backend,
    is_native,
    megatron,
    model_content,
    model_shape,
    recompute,
    recomputed,
)
from nemo_rl_offload.config.schema import MegatronConfig
from nemo_rl_offload.config.types import describe, keys_of
from nemo_rl_offload.errors import ConfigError, nearest
from nemo_rl_offload.specs.model_families import needs_torch_layers, refusals
from nemo_rl_offload.specs.model_keys import rotation_factor
from nemo_rl_offload.specs.offload_modules import (
    COUNTED_RECOMPUTE,
    DENSE_MLP_RECOMPUTE,
    EXPERT_RECOMPUTE,
)
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
    "fp8_cfg.enabled": (True,),
    "cuda_graph_impl": ("transformer_engine",),
    "attention_backend": ("flash", "fused", "unfused", "local", "auto"),
    "optimizer.use_precision_aware_optimizer": (True,),
}
"""Keys and those of their values that only Transformer Engine can honor."""

FUSIONS = ("apply_rope_fusion", "moe_permute_fusion", "gradient_accumulation_fusion")
"""Those of them that make layers faster, and nothing else: a model whose layers are plain torch goes without."""
PRECISION_AWARE = "optimizer.use_precision_aware_optimizer"
"""Of Transformer Engine's optimizer, which takes any layers' weights."""

_OWNERS = {
    "the model's folder, whose weights must fit": (
        "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels num_moe_experts "
        "moe_ffn_hidden_size moe_shared_expert_intermediate_size moe_layer_freq add_bias_linear add_qkv_bias "
        "gated_linear_unit normalization qk_layernorm multi_latent_attention is_hybrid_model hybrid_layer_pattern "
        "mtp_hybrid_override_pattern"
    ),
    "policy.megatron_cfg.fp8_cfg": "fp8 fp8_recipe fp8_param",
    "policy.megatron_cfg.cuda_graph_impl": (
        "enable_cuda_graph external_cuda_graph cuda_graph_scope cuda_graph_use_single_mempool "
        "cuda_graph_retain_backward_graph inference_cuda_graph_scope"
    ),
    "policy.precision": "params_dtype pipeline_dtype autocast_dtype enable_autocast bf16 fp16",
    "this project": (
        "attention_dropout hidden_dropout use_cpu_initialization perform_initialization moe_grouped_gemm "
        "calculate_per_token_loss variable_seq_lengths bias_dropout_fusion deallocate_pipeline_outputs"
    ),
}
_OWNER_OF = {name: owner for owner, names in _OWNERS.items() for name in names.split()}
_YAML_TYPES = {
    **{kind.__name__: kind for kind in (int, float, bool, str, list, dict)},
    **{name: getattr(typing, name) for name in ("Optional", "Union", "Literal", "List", "Dict")},
}
EARLIER_OVERRIDES = ("mtp_loss_scaling_factor", "mtp_detach_heads")
"""Keys that runs of an earlier version have in `model_overrides`, with which they go on."""


def _backend(get: Get) -> Iterator[str]:
    if not megatron(get, "enabled"):
        yield f"{MEGATRON}.enabled: must be true. Megatron-Core is the only training backend."


def transformer_engine_settings(get: Get) -> list[str]:
    """The keys of `policy.megatron_cfg` whose values need Transformer Engine."""
    keys = [key for key, values in NEEDS_TRANSFORMER_ENGINE.items() if megatron(get, key) in values]
    if not is_native(get) and megatron(get, "fine_grained_activation_offloading"):
        keys.append("activation_offload.engine")
    return keys


def _torch_layers(get: Get) -> Iterator[str]:
    impl = megatron(get, "transformer_impl")
    of_model = _key_for_torch_layers(get) if impl == "auto" else None
    if impl != "torch" and of_model is None:
        return
    for key in transformer_engine_settings(get):
        told = f"{MEGATRON}.{key}: {megatron(get, key)}"
        if of_model is None:
            yield f"{told} needs Transformer Engine, which transformer_impl: torch leaves out. Change one of the two."
        elif key not in (*FUSIONS, PRECISION_AWARE):
            yield (
                f"{told} asks for Transformer Engine's layers, not supported here: of a model with {of_model} they do "
                "not do what config.json says, and plain torch has to. Change it."
            )


def fusions_without_effect(get: Get) -> list[str]:
    """Those that are on and that the model's layers, of plain torch with `auto`, do without."""
    fused = [key for key in FUSIONS if megatron(get, key) is True and megatron(get, "transformer_impl") == "auto"]
    return fused if fused and _key_for_torch_layers(get) is not None else []


def _fusions_without_effect(get: Get) -> Iterator[str]:
    if fused := fusions_without_effect(get):
        more = f", nor has {' and '.join(fused[1:])}" if fused[1:] else ""
        why = f"the model's layers are plain torch ({_key_for_torch_layers(get)} of config.json)"
        yield f"{MEGATRON}.{fused[0]}: has no effect{more}: {why}."


def _rotation_without_effect(get: Get) -> Iterator[str]:
    if not megatron(get, "apply_rope_fusion") or fusions_without_effect(get):
        return
    try:
        content = model_content(get)
    except ConfigError:  # which another rule reports
        return
    if refusals(content) or content.get("kv_lora_rank") or needs_torch_layers(content):
        return
    if (factor := rotation_factor(content)) != 1:
        yield (
            f"{MEGATRON}.apply_rope_fusion: has no effect: the model's positions multiply cosine and sine by "
            f"{factor:.4g}, which Transformer Engine's kernel leaves out."
        )


def _key_for_torch_layers(get: Get) -> str | None:
    try:
        return needs_torch_layers(model_content(get))
    except ConfigError:  # which another rule reports
        return None


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


def _further_tokens(get: Get) -> Iterator[str]:
    """Which of the model's layers for further tokens are trained, and whether its one is repeated."""
    wanted, is_repeated = megatron(get, "mtp_num_layers"), megatron(get, "mtp_use_repeated_layer")
    if wanted == 0 or (wanted is None and not is_repeated):
        return
    there, may_repeat = model_shape(get).num_mtp_layers, bool(model_shape(get).hybrid_layers)
    if wanted is not None and wanted != there and not (may_repeat and is_repeated and there):
        fix = f"Set it to {there}, or to 0 to leave them out." if there else "Set it to 0."
        if there and may_repeat:
            fix = f"{fix[:-1]}; or set mtp_use_repeated_layer to true."
        yield (
            f"{MEGATRON}.mtp_num_layers: {wanted} asks for further multi-token prediction, not supported here: a model "
            f"has as many such layers as its folder says, {there}. {fix}"
        )
    elif is_repeated and there > 1:
        yield (
            f"{MEGATRON}.mtp_use_repeated_layer: true asks for a repeated layer of multi-token prediction, not "
            f"supported here: each of the model's {there} is trained as it is in the folder. Set it to false."
        )


def _recompute_names(get: Get) -> Iterator[str]:
    path = f"{MEGATRON}.recompute_modules"
    for name in megatron(get, "recompute_modules") or []:
        if name not in RECOMPUTE_MODULES:
            hint = nearest(name, RECOMPUTE_MODULES)
            yield f"{path}: '{name}': unknown module.{hint} Allowed: {', '.join(RECOMPUTE_MODULES)}."


_TWINS = {"mlp_act": "moe_act", "mlp": "moe", "moe_act": "mlp_act", "moe": "mlp"}
"""Of layers with and without experts, what recomputes the same part. A list with both fits every model."""


def _recompute_fits_model(get: Get) -> Iterator[str]:
    names = recomputed(get)
    if names == ["core_attn"]:
        return
    shape = model_shape(get)
    present = {
        "experts": (EXPERT_RECOMPUTE, shape.has_experts),
        "shared experts": (("shared_experts",), shape.has_shared_experts),
        "latent attention": (("mla_up_proj",), shape.has_latent_attention),
        "linear attention by the kernels of Megatron-Core": (("gdn_norm_out",), False),
        "layers without experts": (DENSE_MLP_RECOMPUTE, shape.has_dense_layers),
    }
    for part, (of_part, is_present) in present.items():
        for name in names:
            twin = _TWINS.get(name)
            if name in of_part and not is_present and twin not in names:
                instead = f"Take {twin}, or remove it." if twin else "Remove it."
                yield f"{MEGATRON}.recompute_modules: '{name}' needs {part}, and the model has none. {instead}"
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


def _latent_experts(get: Get) -> Iterator[str]:
    """What is not done of experts that compute in fewer elements than the model's layers have."""
    try:
        size = model_content(get).get("moe_latent_size")
    except ConfigError:  # which another rule reports
        return
    if not size:
        return
    allowed = {
        "peft.enabled": (False, "LoRA of experts in fewer elements"),
        "moe_expert_rank_capacity_factor": (None, "buffers of fixed size of experts in fewer elements"),
        "moe_shared_expert_overlap": (False, "an overlap of experts in fewer elements with shared ones"),
    }
    for key, (value, feature) in allowed.items():
        if (given := megatron(get, key)) not in (value, None):
            yield (
                f"{MEGATRON}.{key}: {json.dumps(given)} asks for {feature}, not supported here: nobody has tried it "
                f"(moe_latent_size {size} of config.json). Set it to {json.dumps(value)}."
            )


def _flex_dispatcher(get: Get) -> Iterator[str]:
    """What its libraries do not do, and Megatron-Core says when layers are built, or not at all."""
    if megatron(get, "moe_token_dispatcher_type") != "flex" or not model_shape(get).has_experts:
        return
    path, backend = f"{MEGATRON}.moe_token_dispatcher_type", flex_backend(get)
    sizes = (megatron(get, key) for key in ("expert_tensor_parallel_size", "expert_model_parallel_size"))
    if backend != "hybridep" and all(size == 1 for size in sizes):
        yield f"{path}: flex with {backend} needs ranks that share the experts. Raise expert_model_parallel_size."
    if get("policy.precision") != "bfloat16":
        yield f"{path}: flex moves tokens in bfloat16 alone. Set policy.precision to bfloat16, or alltoall here."


def _fused_experts(get: Get) -> Iterator[str]:
    num_ranks = megatron(get, "expert_tensor_parallel_size")
    if num_ranks > 1 and megatron(get, "use_transformer_engine_op_fuser") and model_shape(get).has_experts:
        yield (
            f"{MEGATRON}.use_transformer_engine_op_fuser: Tensor parallelism is not supported, says Megatron-Core of "
            f"fused experts, and expert_tensor_parallel_size is {num_ranks}. Set this to null, or that to 1."
        )


def _bias_activation_fusion(get: Get) -> Iterator[str]:
    if not megatron(get, "bias_activation_fusion"):
        return
    activation = model_shape(get).activation
    if activation != "silu":
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
    warmup, decay = get(f"{path}.lr_warmup_iters"), get(f"{path}.lr_decay_iters")
    if get(f"{path}.lr_decay_style") != "constant" and decay is not None and warmup >= decay:
        yield f"{path}.lr_warmup_iters: {warmup} is not below lr_decay_iters, {decay}. Lower it."


def _distributed_optimizer(get: Get) -> Iterator[str]:
    path = f"{MEGATRON}.optimizer"
    if get(f"{path}.use_distributed_optimizer") and get(f"{path}.optimizer") != "adam":
        yield f"{path}.use_distributed_optimizer: Megatron-Core splits adam alone. Set it to false, or optimizer: adam."


def _precision_aware_optimizer(get: Get) -> Iterator[str]:
    path = f"{MEGATRON}.optimizer"
    if get(f"{path}.use_precision_aware_optimizer") and not get(f"{path}.use_distributed_optimizer"):
        yield f"{path}.use_precision_aware_optimizer: needs use_distributed_optimizer. Turn that on, or this off."


def _nothing_on_the_host(get: Get) -> Iterator[str]:
    path = f"{MEGATRON}.optimizer"
    if get(f"{path}.optimizer_cpu_offload") and get(f"{path}.optimizer_offload_fraction") == 0:
        yield (
            f"{path}.optimizer_cpu_offload: optimizer_offload_fraction is 0, so nothing of the optimizer waits in host "
            "memory. Raise that, or set this to false."
        )


def _overlap(get: Get) -> Iterator[str]:
    ddp = f"{MEGATRON}.distributed_data_parallel_config"
    if not get(f"{ddp}.overlap_param_gather"):
        return
    for needed in (f"{MEGATRON}.optimizer.use_distributed_optimizer", f"{ddp}.overlap_grad_reduce"):
        if not get(needed):
            yield f"{ddp}.overlap_param_gather: needs {needed}. Set that to true, or this to false."


def _recompute_is_off(get: Get) -> Iterator[str]:
    if megatron(get, "activation_checkpointing") is False:
        for key in RECOMPUTE_KEYS:
            if megatron(get, key) is not None:
                yield f"{MEGATRON}.{key}: ignored with activation_checkpointing false."
        return
    unused = {None: ("modules", "method", "num_layers"), "selective": ("method",), "full": ("modules",)}
    granularity = recompute(get)["recompute_granularity"]
    if granularity == "selective" and megatron(get, "activation_checkpointing"):
        yield (
            f"{MEGATRON}.activation_checkpointing: true, and recompute_granularity selective: the listed modules are "
            "recomputed, not whole layers. For those: recompute_granularity=full recompute_modules=null "
            "recompute_method=uniform recompute_num_layers=1."
        )
    for key in unused[granularity]:
        if megatron(get, f"recompute_{key}") is not None:
            told = f"{MEGATRON}.recompute_{key}: ignored with recompute_granularity {granularity or 'null'}"
            other = "full" if megatron(get, "recompute_modules") is None else "selective"
            yield (
                f"{told}."
                if granularity
                else f"{told}, and nothing is recomputed. Set that to {other}, or this to null."
            )


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
            f"reached. Lower it, such as {path}={num_updates // 10}."
        )


def _no_further_tokens(get: Get) -> Iterator[str]:
    keys = ("mtp_loss_scaling_factor", "mtp_detach_heads", "mtp_use_repeated_layer")
    given = [key for key in keys if megatron(get, key)]
    if given and not model_shape(get).predicts_further_tokens:
        why = (
            "with mtp_num_layers 0" if megatron(get, "mtp_num_layers") == 0 else "because the model has no such layers"
        )
        yield from (f"{MEGATRON}.{key}: ignored {why}." for key in given)


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
    given += ["moe_token_dispatcher_type"] if megatron(get, "moe_token_dispatcher_type") != "alltoall" else []
    if given and not model_shape(get).has_experts:
        yield from (f"{MEGATRON}.{key}: ignored, because the model has no experts." for key in given)


def model_overrides(get: Get) -> Iterator[str]:
    """A rule: `model_overrides` names fields of Megatron-Core that no key and nobody else sets."""
    overrides = megatron(get, "model_overrides")
    fields = transformer_fields() if overrides else {}
    for name, value in overrides.items():
        path = f"{MEGATRON}.model_overrides.{name}"
        is_earlier = name in EARLIER_OVERRIDES and megatron(get, name) is None
        if name in keys_of(MegatronConfig) and not is_earlier:
            yield f"{path}: has a key of its own. Set {MEGATRON}.{name} instead."
        elif name in _OWNER_OF:
            yield f"{path}: is set by {_OWNER_OF[name]}. Remove it."
        elif name not in fields:
            yield f"{path}: Megatron-Core's TransformerConfig has no such field.{nearest(str(name), fields)}"
        elif (annotation := _type_of_field(fields[name])) is None:
            yield f"{path}: its type, {fields[name]}, cannot be written in YAML. Remove it."
        elif not _is_of_type(value, annotation):
            yield f"{path}: {value!r} is not allowed. Allowed: {describe(annotation)}."


def _type_of_field(source: str) -> Any:
    names = {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}
    if not names <= _YAML_TYPES.keys() | {"None"}:
        return None
    return eval(source, {"__builtins__": {}}, _YAML_TYPES)  # noqa: S307 - Megatron-Core's own text, of known names


def _is_of_type(value: Any, annotation: Any) -> bool:
    try:
        TypeAdapter(annotation, config=ConfigDict(strict=True, allow_inf_nan=False)).validate_python(value)
    except ValidationError:
        return False
    return True


@cache
def transformer_fields() -> dict[str, str]:
    """Return the fields of Megatron-Core's TransformerConfig, each with the text of its type."""
    return {
        node.target.id: ast.unparse(node.annotation)
        for section in _config_classes()
        for node in section.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


@cache
def _fields_that_megatron_checks() -> set[str]:
    checks = [
        node
        for section in _config_classes()
        for node in section.body
        if isinstance(node, ast.FunctionDef) and node.name == "__post_init__"
    ]
    return {node.attr for check in checks for node in ast.walk(check) if isinstance(node, ast.Attribute)}


@cache
def _config_classes() -> list[ast.ClassDef]:
    package = find_spec("megatron.core")
    assert package is not None
    assert package.submodule_search_locations
    root = Path(package.submodule_search_locations[0])
    sources = {
        "ModelParallelConfig": "model_parallel_config.py",
        "TransformerConfig": "transformer/transformer_config.py",
    }
    return [
        node
        for name, file in sources.items()
        for node in ast.parse((root / file).read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name == name
    ]


def _left_to_megatron(get: Get) -> Iterator[str]:
    for name in megatron(get, "model_overrides"):
        is_refused = (name in keys_of(MegatronConfig) and name not in EARLIER_OVERRIDES) or name in _OWNER_OF
        if name in _fields_that_megatron_checks() and not is_refused:
            yield f"{MEGATRON}.model_overrides.{name}: Megatron-Core's own rules for it are checked when workers start."


MEGATRON_RULES: tuple[Rule, ...] = (
    _backend,
    _torch_layers,
    _recompute,
    _further_tokens,
    _recompute_of_further_tokens,
    _recompute_names,
    _recompute_fits_model,
    _experts,
    _latent_experts,
    _flex_dispatcher,
    _fused_experts,
    _bias_activation_fusion,
    _learning_rate,
    _weight_decay,
    _warmup,
    _distributed_optimizer,
    _precision_aware_optimizer,
    _overlap,
)
MEGATRON_WARNINGS: tuple[Rule, ...] = (
    _fusions_without_effect,
    _rotation_without_effect,
    _recompute_is_off,
    _recompute_skips_further_tokens,
    _warmup_never_ends,
    _nothing_on_the_host,
    _no_further_tokens,
    _no_experts,
    _left_to_megatron,
)
