"""Rules about adapters (`policy.megatron_cfg.peft`): what they are for, and what they cannot be combined with."""

from collections.abc import Iterator
from typing import Any

from nemo_rl_offload.config.rules.rule import MEGATRON, Get, megatron, model_shape
from nemo_rl_offload.specs.lora import Adapted, adapted, target_problems

PEFT = f"{MEGATRON}.peft"


def _peft(get: Get, key: str) -> Any:
    return get(f"{PEFT}.{key}")


def _adapted(get: Get) -> list[Adapted]:
    """The linears that get adapters; none where the targets are wrong, which another rule says, or LoRA is off."""
    targets, excluded = _peft(get, "target_modules"), _peft(get, "exclude_modules")
    if not _peft(get, "enabled") or any(target_problems(model_shape(get), targets, excluded)):
        return []
    return adapted(model_shape(get), targets, excluded)


def _targets(get: Get) -> Iterator[str]:
    if _peft(get, "enabled"):
        shape = model_shape(get)
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
    for key in ("moe_expert_rank_capacity_factor", "moe_paged_stash"):
        if of_experts and megatron(get, key):
            yield (
                f"{MEGATRON}.{key}: not with adapters of experts, which would learn from rows that hold no token. Name "
                f"other modules in peft.target_modules, or set this to {'null' if 'factor' in key else 'false'}."
            )


def _without_effect(get: Get) -> Iterator[str]:
    if not _peft(get, "enabled"):
        given = [key for key in ("target_modules", "exclude_modules") if _peft(get, key)]
        yield from (f"{PEFT}.{key}: ignored without peft.enabled." for key in given)
        return
    if megatron(get, "freeze_moe_router"):
        yield f"{MEGATRON}.freeze_moe_router: ignored, because peft freezes the whole model."
    offloaded = megatron(get, "offload_modules")
    if isinstance(offloaded, list) and "mlp_fc1" in offloaded:
        yield f"{MEGATRON}.offload_modules: mlp_fc1 saves nothing of a frozen MLP with transformer_impl: torch."


LORA_RULES = (_targets, _adapters, _beside_adapters)
LORA_WARNINGS = (_without_effect,)
