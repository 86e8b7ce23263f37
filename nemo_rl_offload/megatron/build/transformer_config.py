"""Policy configuration to Megatron-Core's configuration objects.

A Megatron-Bridge provider, which is a `TransformerConfig` that already knows the model's shape, receives the policy's
values. Megatron's own checks then run on the *Megatron view* of the result: values that only this project has are
translated into what Megatron would be told for the same run (`megatron_view`), and put back afterwards. So a
combination that Megatron refuses is refused here too, in Megatron's words, before a model is built.
"""

import importlib.util
import re
import shutil
import traceback
from collections.abc import Mapping
from functools import partial, reduce
from operator import getitem
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.moe.router import Router

from nemo_rl_offload.config.rules.megatron import transformer_engine_settings
from nemo_rl_offload.config.schema import MegatronConfig, PolicyConfig, SchedulerConfig
from nemo_rl_offload.config.schema import OptimizerConfig as OptimizerKeys
from nemo_rl_offload.config.types import forwarded, keys_of
from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.megatron.build.bridge import have_transformer_engine
from nemo_rl_offload.megatron.layers.dense_mlp import open_dense_mlps, recompute_dense_mlps
from nemo_rl_offload.megatron.layers.torch_backend import torch_block_spec
from nemo_rl_offload.specs.offload_modules import (
    DENSE_MLP_RECOMPUTE,
    MEGATRON_MODULES,
    NATIVE_MODULES,
    STASHED_MODULES,
    TRANSFORMER_ENGINE_MODULES,
    discarded_by_recompute,
)
from nemo_rl_offload.specs.recompute import known_to_megatron, recompute_settings, recomputed_modules

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def resolve_transformer_impl(name: str) -> str:
    """`torch` or `transformer_engine`; `auto` takes the latter where it imports and a GPU is there.

    Raises ConfigError when Transformer Engine is asked for and cannot be used.
    """
    usable = torch.cuda.is_available() and have_transformer_engine()
    if name == "auto":
        return "transformer_engine" if usable else "torch"
    if name == "transformer_engine" and not usable:
        raise ConfigError(
            "policy.megatron_cfg.transformer_impl: transformer_engine cannot be used here "
            "(it does not import, or there is no GPU); use torch or auto"
        )
    return name


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


def megatron_view(transformer_impl: str, offload: bool | None, modules: list[str]) -> dict[str, Any]:
    """What Megatron is told for its own checks.

    | here | Megatron's view |
    |---|---|
    | `transformer_impl: torch` | `local` |
    | its experts' capacity and paged stash, which are this project's | none |
    | offloading null | nothing: the provider's own values stay |
    | modules that only this project offloads, `auto` | taken out; offloading is off when none remains |
    """
    view: dict[str, Any] = {"transformer_impl": transformer_impl}
    if transformer_impl == "torch":
        view = {"transformer_impl": "local", "moe_paged_stash": False, "moe_expert_rank_capacity_factor": None}
    if offload is None:
        return view
    known = [module for module in modules if module in MEGATRON_MODULES] if offload else []
    return view | {"fine_grained_activation_offloading": bool(known), "offload_modules": known}


def offloaded_modules(cfg: MegatronConfig, has_latent_attention: bool = True) -> list[str]:
    """The modules whose regions are open: those listed, or with `auto` all that can be chosen from; none when off.

    Of attention more can be chosen from where it is known not to be latent.
    """
    listed = cfg["offload_modules"]
    if not cfg["fine_grained_activation_offloading"] or listed is None:
        return []
    if listed != "auto":
        return list(listed)
    recomputed = recomputed_modules(recompute_settings(cfg))
    discarded = discarded_by_recompute(has_latent_attention)
    taken = {name for recompute in recomputed for name in discarded.get(recompute, ())}
    if cfg["moe_paged_stash"]:
        taken.update(STASHED_MODULES)
    return [name for name in NATIVE_MODULES if name not in taken]


def _precision_fields(policy: PolicyConfig) -> dict[str, Any]:
    dtype = _DTYPES[policy["precision"]]
    return {"params_dtype": dtype, "pipeline_dtype": dtype, "bf16": dtype == torch.bfloat16, "fp16": False}


def _fusions(provider: Any) -> dict[str, Any]:
    """What Megatron fuses with torch.compile, which needs a C compiler at run time."""
    fuse = torch.cuda.is_available() and any(map(shutil.which, ("cc", "gcc", "clang")))
    is_swiglu = provider.activation_func is F.silu and provider.gated_linear_unit
    return {"bias_activation_fusion": fuse and is_swiglu, "bias_dropout_fusion": fuse}


def _torch_fields(provider: Any) -> dict[str, Any]:
    return {
        "transformer_layer_spec": torch_block_spec,
        "moe_grouped_gemm": True,
        "moe_shared_expert_overlap": False,  # on a stream of their own, shared experts cannot be offloaded
        **_fusions(provider),
        **dict.fromkeys(NOT_IN_TORCH, False),
    }


def _transformer_engine_fields(provider: Any) -> dict[str, Any]:
    """Bridge turns on what Transformer Engine's linears can do, which Megatron's own output layer needs Apex for, and
    leaves fusions out for some models, whose MLPs then save a tensor more."""
    fused = {name: True for name, is_fused in _fusions(provider).items() if is_fused}
    return fused if importlib.util.find_spec(_APEX_EXTENSION) else {**fused, "gradient_accumulation_fusion": False}


def _transformer_fields(provider: Any, policy: PolicyConfig, transformer_impl: str) -> dict[str, Any]:
    """Megatron's fields and their values, later ones over earlier ones."""
    recompute = known_to_megatron(recompute_settings(policy["megatron_cfg"]))
    cfg: Mapping[str, Any] = {**policy["megatron_cfg"], **recompute}
    backend = cfg["attention_backend"]
    return {
        **_precision_fields(policy),
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "use_cpu_initialization": not torch.cuda.is_available(),
        "perform_initialization": False,  # every weight is read from the model's folder
        "seq_length": policy["max_total_sequence_length"],
        **(_torch_fields(provider) if transformer_impl == "torch" else _transformer_engine_fields(provider)),
        **{key: cfg[key] for key in FORWARDED},
        **{key: cfg[key] for key in FORWARDED_UNLESS_NULL if cfg[key] is not None},
        **({} if backend is None else {"attention_backend": AttnBackend[backend]}),
        **cfg["model_overrides"],
    }


def _check_layers(provider: Any, policy: PolicyConfig, transformer_impl: str) -> None:
    """What only this machine and the model together can tell about `transformer_impl: auto`."""
    cfg = policy["megatron_cfg"]
    if transformer_impl == "torch":
        values: Any = {"policy": policy}
        for key in transformer_engine_settings(lambda path: reduce(getitem, path.split("."), values)):
            raise ConfigError(
                f"policy.megatron_cfg.{key} needs Transformer Engine, which cannot be used here "
                "(it does not import, or there is no GPU)"
            )
        return
    listed = [] if cfg["offload_modules"] == "auto" else offloaded_modules(cfg)
    has_boundary = dict.fromkeys(set(NATIVE_MODULES) - set(TRANSFORMER_ENGINE_MODULES), False)
    has_boundary |= {"attn_norm": provider.multi_latent_attention, "mlp_norm": provider.num_moe_experts is not None}
    if cfg["activation_offload"]["engine"] == "native" and recompute_settings(cfg)["recompute_granularity"] == "full":
        has_boundary["attn_norm"] = True  # the layer's input, in the checkpoint around it
    if without := [name for name in listed if not has_boundary.get(name, True)]:
        raise ConfigError(
            f"policy.megatron_cfg.offload_modules: {without} have no boundary of their own in Transformer Engine's "
            "layers; take them out, or use transformer_impl: torch"
        )


def configure_provider(provider: Any, policy: PolicyConfig) -> str:
    """Write the policy's values into a Megatron-Bridge provider and finalize it; returns the layer implementation.

    Raises ConfigError with Megatron's own words when Megatron-Core refuses the combination.
    """
    transformer_impl = resolve_transformer_impl(policy["megatron_cfg"]["transformer_impl"])
    _check_layers(provider, policy, transformer_impl)
    apply_policy(provider, policy, transformer_impl)
    return transformer_impl


def apply_policy(provider: Any, policy: PolicyConfig, transformer_impl: str) -> None:
    """The same for a layer implementation that need not be usable here."""
    cfg = policy["megatron_cfg"]
    offload = cfg["fine_grained_activation_offloading"]
    modules = offloaded_modules(cfg, provider.multi_latent_attention)
    known = [] if cfg["offload_modules"] == "auto" else modules
    fields = _transformer_fields(provider, policy, transformer_impl) | megatron_view(transformer_impl, offload, known)
    for name, value in fields.items():
        assert hasattr(provider, name), f"Megatron has no field {name}"
        setattr(provider, name, value)
    try:
        provider.finalize()
    except (AssertionError, ValueError, ArithmeticError) as error:
        raise _refused("", MegatronConfig, error) from error
    if offload is not None:
        provider.fine_grained_activation_offloading = offload
        provider.offload_modules = modules
    if transformer_impl == "torch":  # Megatron's schedules would start their own stash if told of `moe_paged_stash`
        provider.moe_expert_rank_capacity_factor = cfg["moe_expert_rank_capacity_factor"]
    _register_dense_mlps(provider, cfg, transformer_impl)
    if cfg["freeze_moe_router"]:
        provider.register_pre_wrap_hook(_freeze_routers)


def _register_dense_mlps(provider: Any, cfg: MegatronConfig, transformer_impl: str) -> None:
    recompute = recompute_settings(cfg)
    names = recomputed_modules(recompute)
    is_offloaded = cfg["fine_grained_activation_offloading"] and cfg["activation_offload"]["engine"] == "native"
    if transformer_impl != "torch" and (is_offloaded or not set(names).isdisjoint(DENSE_MLP_RECOMPUTE)):
        provider.register_pre_wrap_hook(open_dense_mlps)
    if names:
        num_layers = recompute["recompute_num_layers"]
        provider.register_pre_wrap_hook(partial(recompute_dense_mlps, modules=names, num_layers=num_layers))


def _freeze_routers(chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
    for router in (module for chunk in chunks for module in chunk.modules() if isinstance(module, Router)):
        for parameter in router.parameters():
            parameter.requires_grad = False
    return chunks


def optimizer_config(policy: PolicyConfig) -> OptimizerConfig:
    """`policy.megatron_cfg.optimizer` as Megatron's OptimizerConfig."""
    section = policy["megatron_cfg"]["optimizer"]
    dtype = _DTYPES[policy["precision"]]
    try:
        return OptimizerConfig(**section, params_dtype=dtype, bf16=dtype == torch.bfloat16)
    except (AssertionError, ValueError, RuntimeError) as error:
        raise _refused("optimizer", OptimizerKeys, error) from error


def ddp_config(policy: PolicyConfig) -> DistributedDataParallelConfig:
    """`policy.megatron_cfg.distributed_data_parallel_config` as Megatron's own."""
    cfg = policy["megatron_cfg"]
    return DistributedDataParallelConfig(
        **cfg["distributed_data_parallel_config"],
        use_distributed_optimizer=cfg["optimizer"]["use_distributed_optimizer"],
    )


def learning_rate_scheduler(policy: PolicyConfig, optimizer: Any, num_steps: int) -> OptimizerParamScheduler:
    """The learning rate over `num_steps` optimizer steps, from `policy.megatron_cfg.scheduler`."""
    section, optim = policy["megatron_cfg"]["scheduler"], policy["megatron_cfg"]["optimizer"]
    warmup_steps = section["lr_warmup_iters"]
    start, end = section["start_weight_decay"], section["end_weight_decay"]
    # Megatron wants the decay to end after the warm-up, also where a constant rate has no decay.
    decay_steps = max(section["lr_decay_iters"] or num_steps, warmup_steps + 1)
    try:
        return OptimizerParamScheduler(
            optimizer,
            init_lr=section["lr_warmup_init"],
            max_lr=optim["lr"],
            min_lr=optim["min_lr"],
            lr_warmup_steps=warmup_steps,
            lr_decay_steps=decay_steps,
            lr_decay_style=section["lr_decay_style"],
            start_wd=optim["weight_decay"] if start is None else start,
            end_wd=optim["weight_decay"] if end is None else end,
            wd_incr_steps=decay_steps,
            wd_incr_style=section["weight_decay_incr_style"],
            use_checkpoint_opt_param_scheduler=False,
            override_opt_param_scheduler=True,  # a run that was made longer follows its present schedule
        )
    except AssertionError as error:
        raise _refused("scheduler", SchedulerConfig, error) from error


def _refused(section: str, keys: type, error: Exception) -> ConfigError:
    """Megatron's own words, or its code where it says none, with the path of the first key that they name."""
    words = " ".join(str(error).split()) or str(traceback.extract_tb(error.__traceback__)[-1].line)
    named = [name for name in re.findall(r"\w+", words.replace("-", "_")) if name in keys_of(keys)]
    path = ".".join(["policy.megatron_cfg", *([section] if section else []), *named[:1]])
    return ConfigError(f"{path}: Megatron-Core refuses this configuration: {words}")
