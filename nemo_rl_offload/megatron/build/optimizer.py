"""Policy configuration to Megatron-Core's optimizer, its schedule, and the data parallelism of gradients."""

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from nemo_rl_offload.config.schema import OptimizerConfig as OptimizerKeys
from nemo_rl_offload.config.schema import PolicyConfig, SchedulerConfig
from nemo_rl_offload.megatron.build.refusal import refused

KEYS_ON_HOST = ("optimizer_cpu_offload", "optimizer_offload_fraction")


def optimizer_config(policy: PolicyConfig) -> OptimizerConfig:
    """`policy.megatron_cfg.optimizer` as Megatron's OptimizerConfig.

    What is to be on the host is not Megatron's matter: its own HybridDeviceOptimizer would update it on the CPU, with
    other bits (`policy.residency` streams it through the device). The precision-aware optimizer takes half of each main
    weight from the weight itself, which holds something else in quantization-aware training.
    """
    section = {key: value for key, value in policy["megatron_cfg"]["optimizer"].items() if key not in KEYS_ON_HOST}
    if policy["quant_cfg"] is not None:
        section["use_precision_aware_optimizer"] = False
    dtype = getattr(torch, policy["precision"])
    try:
        return OptimizerConfig(**section, params_dtype=dtype, bf16=dtype == torch.bfloat16)
    except (AssertionError, ValueError, RuntimeError) as error:
        raise refused("optimizer", OptimizerKeys, error) from error


def ddp_config(policy: PolicyConfig) -> DistributedDataParallelConfig:
    """`policy.megatron_cfg.distributed_data_parallel_config` as Megatron's own."""
    megatron_cfg = policy["megatron_cfg"]
    return DistributedDataParallelConfig(
        **megatron_cfg["distributed_data_parallel_config"],
        use_distributed_optimizer=megatron_cfg["optimizer"]["use_distributed_optimizer"],
    )


def learning_rate_scheduler(
    policy: PolicyConfig, optimizer: MegatronOptimizer, num_steps: int
) -> OptimizerParamScheduler:
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
        raise refused("scheduler", SchedulerConfig, error) from error
