"""Policy configuration to Megatron-Core's configuration objects.

A Megatron-Bridge provider, which is a `TransformerConfig` that already knows the model's shape, receives the policy's
values. Megatron's own checks then run on the *Megatron view* of the result: values that only this project has are
translated into what Megatron would be told for the same run (`megatron_view`), and put back afterwards. So a
combination that Megatron refuses is refused here too, in Megatron's words, before a model is built.
"""

import shutil
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from nemo_rl_offload.config.schema import MegatronConfig, PolicyConfig
from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.megatron.bridge import have_transformer_engine
from nemo_rl_offload.megatron.torch_backend import torch_block_spec
from nemo_rl_offload.planner.modules import MEGATRON_MODULES

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_FUSED_NORMS = {"attn_norm", "mlp_norm"}


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


def megatron_view(transformer_impl: str, offload: bool, modules: list[str]) -> dict[str, Any]:
    """What Megatron is told for its own checks.

    | here | Megatron's view |
    |---|---|
    | `transformer_impl: torch` | `local` |
    | modules that only this project offloads | taken out; offloading is off when none remains |
    """
    known = [module for module in modules if module in MEGATRON_MODULES] if offload else []
    return {
        "transformer_impl": "local" if transformer_impl == "torch" else transformer_impl,
        "fine_grained_activation_offloading": bool(known),
        "offload_modules": known,
    }


def _transformer_fields(policy: PolicyConfig, transformer_impl: str) -> dict[str, Any]:
    cfg: MegatronConfig = policy["megatron_cfg"]
    on_gpu = torch.cuda.is_available()
    dtype = _DTYPES[policy["precision"]]
    fields: dict[str, Any] = {
        key: cfg[key]
        for key in (
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "context_parallel_size",
            "expert_model_parallel_size",
            "sequence_parallel",
            "recompute_granularity",
            "recompute_method",
            "recompute_num_layers",
            "min_offloaded_tensor_size",
            "moe_token_dispatcher_type",
        )
    }
    if cfg["recompute_modules"] is not None:
        fields["recompute_modules"] = cfg["recompute_modules"]
    if cfg["moe_aux_loss_coeff"] is not None:
        fields["moe_aux_loss_coeff"] = cfg["moe_aux_loss_coeff"]
    fields |= {
        "expert_tensor_parallel_size": 1,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "use_cpu_initialization": not on_gpu,
        "perform_initialization": False,  # every weight is read from the model's folder
        "seq_length": policy["max_total_sequence_length"],
    }
    if transformer_impl == "torch":
        # Megatron fuses these two with torch.compile, which needs a C compiler at run time.
        fuse = on_gpu and any(map(shutil.which, ("cc", "gcc", "clang")))
        fields |= {
            "transformer_layer_spec": torch_block_spec,
            "moe_grouped_gemm": True,
            "bias_activation_fusion": fuse,
            "bias_dropout_fusion": fuse,
            **dict.fromkeys(
                (
                    "apply_rope_fusion",
                    "masked_softmax_fusion",
                    "gradient_accumulation_fusion",
                    "persist_layer_norm",
                    "moe_permute_fusion",
                    "moe_router_fusion",
                    "cross_entropy_loss_fusion",
                ),
                False,
            ),
        }
    return fields


def configure_provider(provider: Any, policy: PolicyConfig) -> str:
    """Write the policy's values into a Megatron-Bridge provider and finalize it; returns the layer implementation.

    Raises ConfigError with Megatron's own words when Megatron-Core refuses the combination.
    """
    cfg = policy["megatron_cfg"]
    offload, modules = cfg["fine_grained_activation_offloading"], cfg["offload_modules"] or []
    transformer_impl = resolve_transformer_impl(cfg["transformer_impl"])
    if transformer_impl == "transformer_engine" and offload and _FUSED_NORMS & set(modules):
        raise ConfigError(
            f"policy.megatron_cfg.offload_modules: {sorted(_FUSED_NORMS & set(modules))} have no boundary of their own "
            "in Transformer Engine's fused norm+linear; take them out, or use transformer_impl: torch"
        )
    fields = _transformer_fields(policy, transformer_impl) | megatron_view(transformer_impl, offload, modules)
    for name, value in fields.items():
        if hasattr(provider, name):
            setattr(provider, name, value)
        else:
            assert name.startswith("moe_"), f"Megatron has no field {name}"
    try:
        provider.finalize()
    except (AssertionError, ValueError) as error:
        raise ConfigError(f"policy.megatron_cfg: Megatron-Core refuses this configuration: {error}") from error
    provider.fine_grained_activation_offloading = offload
    provider.offload_modules = list(modules) if offload else []
    return transformer_impl


def optimizer_config(policy: PolicyConfig) -> OptimizerConfig:
    """`policy.megatron_cfg.optimizer` as Megatron's OptimizerConfig."""
    section = policy["megatron_cfg"]["optimizer"]
    dtype = _DTYPES[policy["precision"]]
    return OptimizerConfig(**section, params_dtype=dtype, bf16=dtype == torch.bfloat16)


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
    # Megatron wants the decay to end after the warm-up, also where a constant rate has no decay.
    decay_steps = max(section["lr_decay_iters"] or num_steps, warmup_steps + 1)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=section["lr_warmup_init"],
        max_lr=optim["lr"],
        min_lr=optim["min_lr"],
        lr_warmup_steps=warmup_steps,
        lr_decay_steps=decay_steps,
        lr_decay_style=section["lr_decay_style"],
        start_wd=optim["weight_decay"],
        end_wd=optim["weight_decay"],
        wd_incr_steps=decay_steps,
        wd_incr_style="constant",
    )
