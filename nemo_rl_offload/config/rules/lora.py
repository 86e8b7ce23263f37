"""Rules about adapters (`policy.megatron_cfg.peft`): what they are for, and what they cannot be combined with."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from nemo_rl_offload.config.rules.rule import MEGATRON, Get, algorithm_spec, megatron, model_shape
from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.specs.lora import HEAD, Adapted, adapted, target_problems
from nemo_rl_offload.specs.parallel_layout import ParallelLayout, stage_layers

PEFT = f"{MEGATRON}.peft"


def _peft(get: Get, key: str) -> Any:
    return get(f"{PEFT}.{key}")


def _adapted(get: Get) -> list[Adapted]:
    """The linears that get adapters; none where the targets are wrong, which another rule says, or LoRA is off."""
    targets, excluded = _peft(get, "target_modules"), _peft(get, "exclude_modules")
    shape = model_shape(get)
    if not _peft(get, "enabled") or shape.num_delta_heads or (shape.hybrid_layers and shape.num_mtp_layers):
        return []
    if any(target_problems(model_shape(get), targets, excluded)):
        return []
    return adapted(model_shape(get), targets, excluded)


def _targets(get: Get) -> Iterator[str]:
    if _peft(get, "enabled"):
        shape = model_shape(get)
        if shape.num_delta_heads:
            yield (
                f"{PEFT}.enabled: true asks for LoRA of a model with gated delta nets, not supported here: they have "
                "one linear where transformers has four, and a gate in the queries' linear. Set it to false."
            )
            return
        if shape.hybrid_layers and shape.num_mtp_layers:
            yield (
                f"{PEFT}.enabled: true asks for LoRA beside a hybrid model's layers for further tokens, not supported "
                "here: an export has no names for their adapters. Set it to false, or mtp_num_layers to 0."
            )
            return
        for key, problem in target_problems(shape, _peft(get, "target_modules"), _peft(get, "exclude_modules")):
            yield f"{PEFT}.{key}: {problem}"


def _adapters(get: Get) -> Iterator[str]:
    if not _peft(get, "enabled"):
        return
    tensor, dim = megatron(get, "tensor_model_parallel_size"), _peft(get, "dim")
    if dim % tensor:
        yield f"{PEFT}.dim: {dim} is not divisible by tensor_model_parallel_size {tensor}, whose ranks share it."
    if _peft(get, "lora_A_init_method") == _peft(get, "lora_B_init_method") == "zero":
        yield f"{PEFT}.lora_A_init_method: zero beside lora_B_init_method zero has no gradient, ever. Set xavier."
    dtype, precision = _peft(get, "lora_dtype"), get("policy.precision")
    if dtype not in (None, "None", precision):
        yield f"{PEFT}.lora_dtype: {dtype} is not policy.precision, {precision}, which adapters have. Set null."
    if _peft(get, "a2a_experimental") and any(one.parts for one in _adapted(get)):
        yield (
            f"{PEFT}.a2a_experimental: the adapters of each projection do not take it. Set it to false, or name "
            "linear_qkv and linear_fc1."
        )


def _of_output_layer(get: Get) -> Iterator[str]:
    if all(one.linear.name != HEAD for one in _adapted(get)):
        return
    tensor, vocabulary = megatron(get, "tensor_model_parallel_size"), model_shape(get).vocab_size
    if vocabulary % tensor:
        yield (
            f"{PEFT}.target_modules: {HEAD}, whose {vocabulary:,} rows tensor_model_parallel_size {tensor} does not "
            "divide, gets no adapter: the rows that fill it up would have one too. Name other modules, or set "
            "tensor_model_parallel_size to 1."
        )
    if dropout := _peft(get, "dropout"):
        yield (
            f"{PEFT}.dropout: {dropout} is not honoured in an adapter of {HEAD}. Set it to 0, or name other modules in "
            "target_modules."
        )
    if model_shape(get).num_mtp_layers and megatron(get, "mtp_detach_heads"):
        yield (
            f"{MEGATRON}.mtp_detach_heads: true keeps the loss of further tokens from the output layer, not from its "
            f"adapter. Set it to null, or name other modules than {HEAD} in peft.target_modules."
        )


def _beside_adapters(get: Get) -> Iterator[str]:
    if not _peft(get, "enabled"):
        return
    if megatron(get, "use_transformer_engine_op_fuser"):
        yield f"{MEGATRON}.use_transformer_engine_op_fuser: not beside peft, whose adapters stand between. Set null."
    if megatron(get, "gradient_accumulation_fusion"):
        yield f"{MEGATRON}.gradient_accumulation_fusion: not beside peft. Set null."
    if megatron(get, "moe_router_bias_update_rate"):
        yield (
            f"{MEGATRON}.moe_router_bias_update_rate: peft freezes the model, the bias that balances its experts too. "
            "Set it to 0 or null."
        )
    of_experts = any(one.linear.is_of_experts for one in _adapted(get))
    if of_experts and (num_parts := megatron(get, "expert_tensor_parallel_size")) > 1:
        yield (
            f"{MEGATRON}.expert_tensor_parallel_size: {num_parts} asks for adapters of experts that ranks share, not "
            "supported here: Megatron-Bridge's take a rank's part of what is between their two matrices for the whole. "
            "Set it to 1, or name other modules in peft.target_modules."
        )
    for key in ("moe_expert_rank_capacity_factor", "moe_paged_stash"):
        if of_experts and megatron(get, key):
            yield (
                f"{MEGATRON}.{key}: not with adapters of experts, which would learn from rows that hold no token. Name "
                f"other modules in peft.target_modules, or set this to {'null' if 'factor' in key else 'false'}."
            )


def _without_effect(get: Get) -> Iterator[str]:
    if not _peft(get, "enabled"):
        return
    if megatron(get, "freeze_moe_router"):
        yield f"{MEGATRON}.freeze_moe_router: ignored, because peft freezes the whole model."
    offloaded = megatron(get, "offload_modules")
    if isinstance(offloaded, list) and "mlp_fc1" in offloaded:
        yield f"{MEGATRON}.offload_modules: mlp_fc1 saves nothing of a frozen MLP with transformer_impl: torch."
    are_of_experts = [] if _peft(get, "share_expert_adapters") else [one.linear.is_of_experts for one in _adapted(get)]
    if are_of_experts and not any(are_of_experts):
        yield f"{PEFT}.share_expert_adapters: false has no effect: no linear of experts gets an adapter. Set true."


def _reference_begins_elsewhere(get: Get) -> Iterator[str]:
    if not _peft(get, "enabled") or (how := _peft(get, "lora_B_init_method")) == "zero":
        return
    if algorithm_spec(get).keeps_reference({"loss_fn": get("loss_fn")}):
        yield (
            f"{PEFT}.lora_B_init_method: with {how} the policy does not begin as its reference, which is the model "
            "without adapters. Set zero for that."
        )


def _every_stage_has_adapters(get: Get) -> Iterator[str]:
    """A stage without any has nothing to train."""
    if megatron(get, "pipeline_model_parallel_size") == 1 or not (adapters := _adapted(get)):
        return
    num_layers, with_adapters = len(model_shape(get).layers_with_experts), {one.linear.layer for one in adapters}
    keys = {
        "num_layers_first": "num_layers_in_first_pipeline_stage",
        "num_layers_last": "num_layers_in_last_pipeline_stage",
    }
    sizes = {"pipeline": "pipeline_model_parallel_size", "stages": "pipeline_model_parallel_layout", **keys}
    virtual = megatron(get, "virtual_pipeline_model_parallel_size") or 1
    layout = ParallelLayout(virtual=virtual, **{name: megatron(get, key) for name, key in sizes.items()})
    with suppress(ConfigError):  # of a layout, which another rule says
        for rank, chunks in enumerate(stage_layers(layout, num_layers)):
            held = {layer for chunk in chunks for layer in chunk}
            if rank == layout.pipeline - 1:
                held |= {layer for layer in with_adapters if layer >= num_layers}
            if not held & with_adapters:
                yield (
                    f"{PEFT}.target_modules: pipeline stage {rank} has no adapter, and so nothing to train. Name "
                    "modules of all stages, or change pipeline_model_parallel_size or its layers."
                )


LORA_RULES = (_targets, _adapters, _of_output_layer, _beside_adapters, _every_stage_has_adapters)
LORA_WARNINGS = (_without_effect, _reference_begins_elsewhere)
