"""Policy configuration to Megatron-Core's TransformerConfig.

A Megatron-Bridge provider, which is a `TransformerConfig` that already knows the model's shape, receives the policy's
values. What the keys about saved activations mean is resolved before (`specs/activation_memory.py`). Megatron's own
checks then run on the *Megatron view* of the result: values that only this project has are translated into what
Megatron would be told for the same run, and put back afterwards. So a combination that Megatron refuses is refused
here too, in Megatron's words, before a model is built.

How `offload_modules` reaches Megatron's layers: `_resolve` reads the key with those beside it, `_apply` writes
`megatron_view`, lets the provider check itself, and writes `own_fields`, whose `offload_modules` every layer reads.
"""

import importlib.util
import shutil
from collections.abc import Mapping
from functools import partial, reduce
from operator import getitem
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.moe.router import Router
from megatron.core.transformer.transformer_config import TransformerConfig

from nemo_rl_offload.config.rules.megatron import FUSIONS, PRECISION_AWARE, transformer_engine_settings
from nemo_rl_offload.config.schema import MegatronConfig, PolicyConfig
from nemo_rl_offload.config.types import forwarded
from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.megatron.build.refusal import refused
from nemo_rl_offload.megatron.layers.dense_mlp import open_dense_mlps, recompute_dense_mlps
from nemo_rl_offload.megatron.layers.torch_backend import torch_block_spec
from nemo_rl_offload.megatron.runtime.optional_packages import (
    TRANSFORMER_ENGINE,
    transformer_engine_problem,
    why_left_out,
)
from nemo_rl_offload.specs.activation_memory import ResolvedActivations, resolve_activations
from nemo_rl_offload.specs.dispatchers import FLEX_LIBRARIES


def resolve_transformer_impl(name: str) -> str:
    """`torch` or `transformer_engine`; `auto` takes the latter where it imports and a GPU is there.

    Raises ConfigError when Transformer Engine is asked for and cannot be used.
    """
    problem = _transformer_engine_problem()
    if name == "auto":
        return "torch" if problem else "transformer_engine"
    if name == "transformer_engine" and problem:
        raise ConfigError(
            f"policy.megatron_cfg.transformer_impl: transformer_engine cannot be used here ({problem}); use torch or "
            "auto"
        )
    return name


def _transformer_engine_problem() -> str:
    """Why Transformer Engine's layers cannot be used here; empty where they can."""
    if torch.cuda.is_available():
        return transformer_engine_problem()
    return "; ".join(filter(None, [why_left_out(TRANSFORMER_ENGINE), "there is no GPU"]))


FORWARDED = forwarded(MegatronConfig, unless_null=False)
"""Keys that are handed to Megatron's field of the same name as they are."""
FORWARDED_UNLESS_NULL = forwarded(MegatronConfig, unless_null=True)
"""The same, where null keeps the provider's value."""

_APEX_EXTENSION = "fused_weight_gradient_mlp_cuda"

# Fusions that Transformer Engine would do, with the layers of `transformer_impl: torch`.
NOT_IN_TORCH = (
    "apply_rope_fusion",
    "masked_softmax_fusion",
    "gradient_accumulation_fusion",
    "persist_layer_norm",
    "moe_permute_fusion",
    "moe_router_fusion",
    "cross_entropy_loss_fusion",
)


def _precision_fields(policy: PolicyConfig) -> dict[str, object]:
    dtype = getattr(torch, policy["precision"])
    return {"params_dtype": dtype, "pipeline_dtype": dtype, "bf16": dtype == torch.bfloat16, "fp16": False}


def _fp8_fields(megatron_cfg: MegatronConfig) -> dict[str, object]:
    """Megatron's fields of `fp8_cfg`, by which its blocks enter Transformer Engine's context of 8 bits themselves."""
    section = megatron_cfg["fp8_cfg"]
    if not section["enabled"]:
        return {}
    return {key: section[key] for key in ("fp8", "fp8_recipe", "fp8_param")}


def _cuda_graph_fields(megatron_cfg: MegatronConfig) -> dict[str, object]:
    """Of captured layers. Their gradients are added up outside, since the buffers' memory comes and goes."""
    if megatron_cfg["cuda_graph_impl"] == "none":
        return {}
    parts = megatron_cfg["cuda_graph_modules"] or []
    return {"cuda_graph_modules": list(parts), "use_te_rng_tracker": True, "gradient_accumulation_fusion": False}


def _fusions(provider: TransformerConfig) -> dict[str, object]:
    """What Megatron fuses with torch.compile, which needs a C compiler at run time."""
    fuse = torch.cuda.is_available() and any(map(shutil.which, ("cc", "gcc", "clang")))
    is_swiglu = provider.activation_func is F.silu and provider.gated_linear_unit
    has_biased_experts = provider.num_moe_experts is not None and provider.add_bias_linear
    return {
        "bias_activation_fusion": fuse and is_swiglu,
        "bias_dropout_fusion": fuse and not has_biased_experts,  # Megatron refuses it
    }


def _torch_fields(provider: TransformerConfig) -> dict[str, object]:
    """Some of Megatron's activations are compiled in the first step, which takes 20 s on a CPU: without it here."""
    return {
        "activation_func": getattr(provider.activation_func, "_torchdynamo_orig_callable", provider.activation_func),
        "transformer_layer_spec": torch_block_spec,
        "moe_grouped_gemm": True,
        "moe_shared_expert_overlap": False,  # on a stream of their own, shared experts cannot be offloaded
        **_fusions(provider),
        **dict.fromkeys(NOT_IN_TORCH, False),
    }


def _transformer_engine_fields(provider: TransformerConfig) -> dict[str, object]:
    """Bridge turns on what Transformer Engine's linears can do, which Megatron's own output layer needs Apex for, and
    leaves fusions out for some models, whose MLPs then save a tensor more."""
    fused: dict[str, object] = {name: True for name, is_fused in _fusions(provider).items() if is_fused}
    return fused if importlib.util.find_spec(_APEX_EXTENSION) else {**fused, "gradient_accumulation_fusion": False}


def _transformer_fields(
    provider: TransformerConfig, policy: PolicyConfig, activations: ResolvedActivations
) -> dict[str, object]:
    """Megatron's fields and their values, later ones over earlier ones."""
    megatron_cfg = policy["megatron_cfg"]
    recomputed = activations.recompute.keys_for_megatron(has_experts=provider.num_moe_experts is not None)
    values: Mapping[str, object] = {**megatron_cfg, **recomputed}
    backend = megatron_cfg["attention_backend"]
    is_torch = activations.transformer_impl == "torch"
    return {
        **_precision_fields(policy),
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "use_cpu_initialization": not torch.cuda.is_available(),
        "perform_initialization": False,  # every weight is read from the model's folder
        "seq_length": policy["max_total_sequence_length"],
        **(_torch_fields(provider) if is_torch else _transformer_engine_fields(provider)),
        **{key: values[key] for key in FORWARDED},
        **{key: values[key] for key in FORWARDED_UNLESS_NULL if values[key] is not None},
        **({} if backend is None else {"attention_backend": AttnBackend[backend]}),
        **_rotation(provider, megatron_cfg, is_torch=is_torch),
        **_repeated_layer(provider, megatron_cfg),
        **_fp8_fields(megatron_cfg),
        **_cuda_graph_fields(megatron_cfg),
        # The fused kernel chooses and weighs experts at once, and knows no choice of others.
        **({"moe_router_fusion": False} if policy["router_replay"]["enabled"] else {}),
        **megatron_cfg["model_overrides"],
    }


def _rotation(provider: TransformerConfig, megatron_cfg: MegatronConfig, *, is_torch: bool) -> dict[str, object]:
    """A kernel that leaves out what the model says is left out, whatever was asked. Latent attention has its own."""
    if is_torch or provider.multi_latent_attention:
        return {}
    return {"apply_rope_fusion": provider.apply_rope_fusion and megatron_cfg["apply_rope_fusion"] is not False}


def _repeated_layer(provider: TransformerConfig, megatron_cfg: MegatronConfig) -> dict[str, object]:
    """The model's one layer for further tokens, in the place of as many as the run says."""
    if not (provider.mtp_num_layers and megatron_cfg["mtp_use_repeated_layer"]):
        return {}
    return {
        "mtp_use_repeated_layer": True,
        "mtp_num_layers": megatron_cfg["mtp_num_layers"] or provider.mtp_num_layers,
    }


def without_fusions(policy: PolicyConfig) -> PolicyConfig:
    """For a model whose layers are plain torch: `check` says that these have no effect."""
    off: Any = policy["megatron_cfg"] | {key: False for key in FUSIONS if policy["megatron_cfg"][key]}  # type: ignore[literal-required]
    return {**policy, "megatron_cfg": off}


def _check_layers(policy: PolicyConfig, activations: ResolvedActivations) -> None:
    """What only this machine and the model together can tell about `transformer_impl: auto`."""
    if activations.transformer_impl == "torch":
        values: Any = {"policy": policy}
        problem = _transformer_engine_problem()
        for key in transformer_engine_settings(lambda path: reduce(getitem, path.split("."), values)):
            if key == PRECISION_AWARE and problem is None:
                continue
            raise ConfigError(
                f"policy.megatron_cfg.{key} needs Transformer Engine, which cannot be used here "
                f"({problem or 'transformer_impl is torch'})"
            )
    elif without := activations.without_boundary:
        raise ConfigError(
            f"policy.megatron_cfg.offload_modules: {without} have no boundary of their own in Transformer Engine's "
            "layers; take them out, or use transformer_impl: torch"
        )


def have_gpu() -> bool:
    """Whether this worker has one."""
    return torch.cuda.is_available()


def check_flex_dispatcher(backend: str) -> None:
    """Raise ConfigError where this worker cannot bring tokens to their experts by the flex dispatcher's library."""
    from megatron.core.transformer.moe import fused_a2a

    is_there = {
        "deepep": fused_a2a.HAVE_DEEP_EP,
        "hybridep": fused_a2a.HAVE_HYBRIDEP,
        "ncclep": fused_a2a.HAVE_TE_EP,
    }[backend]
    path = f"policy.megatron_cfg.moe_token_dispatcher_type: flex with {backend}"
    if not have_gpu():
        raise ConfigError(f"{path} needs a GPU, and this worker has none. Set alltoall.")
    if not is_there:
        package, how = FLEX_LIBRARIES[backend]
        raise ConfigError(f"{path} cannot be imported from {package} in this worker. {how}, or set alltoall.")


_FP8_NEEDS = {"mxfp8": ((10, 0), "0"), "blockwise": ((9, 0), "12.9")}
_FP8_LEAST: tuple[tuple[int, int], str] = (8, 9), "12.1"


def check_fp8_recipe(recipe: str, capability: tuple[int, int], cuda: str) -> None:
    """Raise ConfigError where a GPU of this compute capability has no products of a recipe of 8 bits.

    As Transformer Engine says itself when a model first runs (`transformer_engine.pytorch.quantization`).
    """
    needed, least_cuda = _FP8_NEEDS.get(recipe, _FP8_LEAST)
    lacking = f"compute capability {'.'.join(map(str, needed))}" if capability < needed else ""
    if not lacking and _numbers(cuda) < _numbers(least_cuda):
        lacking = f"torch for CUDA {least_cuda}"
    if lacking:
        others = [name for name in ("blockwise", "tensorwise") if name != recipe]
        raise ConfigError(
            f"policy.megatron_cfg.fp8_cfg.fp8_recipe: {recipe} needs {lacking}, and this worker has "
            f"{'.'.join(map(str, capability))} with CUDA {cuda}. Set {' or '.join(others)}, or enabled to false."
        )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")[:2]))


def wanted_impl(policy: PolicyConfig, *, needs_torch: bool) -> str:
    """`transformer_impl`, where `auto` is torch for a model that needs torch's layers."""
    name = policy["megatron_cfg"]["transformer_impl"]
    return "torch" if needs_torch and name == "auto" else name


def configure_provider(provider: TransformerConfig, policy: PolicyConfig, *, needs_torch: bool = False) -> str:
    """Write the policy's values into a Megatron-Bridge provider and finalize it; returns the layer implementation.

    `needs_torch`: Transformer Engine's layers do not do what the model's `config.json` says, and `auto` is torch.

    Raises ConfigError with Megatron's own words when Megatron-Core refuses the combination.
    """
    if needs_torch and policy["megatron_cfg"]["transformer_impl"] == "auto":
        policy = without_fusions(policy)
    transformer_impl = resolve_transformer_impl(wanted_impl(policy, needs_torch=needs_torch))
    activations = _resolve(provider, policy, transformer_impl)
    _check_layers(policy, activations)
    if provider.num_moe_experts is not None and policy["megatron_cfg"]["moe_token_dispatcher_type"] == "flex":
        check_flex_dispatcher(policy["megatron_cfg"]["moe_flex_dispatcher_backend"] or "deepep")
    if (section := policy["megatron_cfg"]["fp8_cfg"])["enabled"]:
        check_fp8_recipe(section["fp8_recipe"], torch.cuda.get_device_capability(), torch.version.cuda or "0")
    _apply(provider, policy, activations)
    return transformer_impl


def apply_policy(provider: TransformerConfig, policy: PolicyConfig, transformer_impl: str) -> None:
    """The same for a layer implementation that need not be usable here."""
    _apply(provider, policy, _resolve(provider, policy, transformer_impl))


def _resolve(provider: TransformerConfig, policy: PolicyConfig, transformer_impl: str) -> ResolvedActivations:
    return resolve_activations(
        policy["megatron_cfg"],
        transformer_impl,
        has_latent_attention=provider.multi_latent_attention,
        has_experts=provider.num_moe_experts is not None,
    )


def _apply(provider: TransformerConfig, policy: PolicyConfig, activations: ResolvedActivations) -> None:
    fields = _transformer_fields(provider, policy, activations) | activations.megatron_view
    for name, value in fields.items():
        assert hasattr(provider, name), f"Megatron has no field {name}"
        setattr(provider, name, value)
    try:
        provider.finalize()
    except (AssertionError, ValueError, ArithmeticError) as error:
        raise refused("", MegatronConfig, error) from error
    for name, value in activations.own_fields.items():
        setattr(provider, name, value)
    if activations.opens_dense_mlps:
        provider.register_pre_wrap_hook(open_dense_mlps)
    recompute = activations.recompute
    if recompute.modules:
        hook = partial(recompute_dense_mlps, modules=recompute.modules, num_layers=recompute.num_layers)
        provider.register_pre_wrap_hook(hook)
    if policy["megatron_cfg"]["freeze_moe_router"]:
        provider.register_pre_wrap_hook(_freeze_routers)


def _freeze_routers(chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
    for router in (module for chunk in chunks for module in chunk.modules() if isinstance(module, Router)):
        for parameter in router.parameters():
            parameter.requires_grad = False
    return chunks
