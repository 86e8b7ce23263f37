"""Keys and values of NeMo-RL's configuration that this project does not have.

Unknown keys are errors here, and kept silently there. So that a recipe of NeMo-RL can be read, what NeMo-RL knows is
told apart from what nobody knows: it has a message of its own, and a check can be told to go on without it. The names
come from NeMo-RL's typed dictionaries and exemplars of 2025 and 2026. A section is listed by its own name alone: what
stands in it is not looked at. The other way, a schema that takes these keys and ignores them, would hide from a user
that a setting has no effect.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

UNSUPPORTED = "known to NeMo-RL, not supported here"
MISSING = "missing value"
NOT_ALLOWED = "is not allowed"

_POLICY = (
    "dtensor_cfg automodel_cfg reward_model_cfg hf_config_overrides optimizer "
    "scheduler max_grad_norm make_sequence_length_divisible_by offload_optimizer_for_logprob "
    "refit_buffer_size_gb"
)
_DATASET = (
    "dataset_name data_path input_key output_key subset split prompt_file system_prompt_file env_name processor "
    "download_dir split_validation_size repeat prompt_key chosen_key rejected_key chat_key system_key system_prompt "
    "tool_key use_preserving_dataset num_samples seed"
)
_STEPS = "val_start_at stop_at_validation_metric stop_at_validation_threshold"
_SUPERVISED = "val_batches val_global_batch_size val_micro_batch_size"

_NAMES = {
    "": (
        "rm ppo reward_penalties data_plane on_policy_distillation async_rl rollout_checkpointing rollout_recovery "
        "token_capture"
    ),
    "policy": _POLICY,
    "policy.tokenizer": "audio video use_processor",
    "policy.megatron_cfg": (
        "converter_type pipeline_dtype defer_fp32_logits moe_enable_deepep peft fp8_cfg "
        "checkpoint force_overwrite_initial_ckpt force_reconvert_from_hf use_gloo_process_groups fp32_lm_head "
        "use_fused_weighted_squared_relu"
    ),
    "policy.megatron_cfg.optimizer": "bf16 fp16 params_dtype overlap_cpu_optimizer_d2h_h2d",
    "policy.megatron_cfg.distributed_data_parallel_config": (
        "average_in_collective use_custom_fsdp data_parallel_sharding_strategy"
    ),
    "policy.generation": (
        "vllm_cfg vllm_kwargs sglang_cfg trtllm_cfg mcore_generation_config "
        "bad_words model_name use_async_rollouts "
        "port_range_low port_range_high refit_transport refit_cfg lora_refit_mode quant_cfg real_quant "
        "real_quant_ignore real_quant_export_cpu_offload nvfp4_pertoken_rollout worker_extension_cls_fqn"
    ),
    "loss_fn": (
        "kl_input_clamp_value kl_output_clamp_value disable_ppo_ratio use_on_policy_kl_approximation "
        "truncated_importance_sampling_ratio_min truncated_importance_sampling_type force_on_policy_ratio "
        "positive_example_nll_weight"
    ),
    "grpo": (
        f"max_num_epochs {_STEPS} reward_scaling async_grpo adv_estimator advantage_clip_low advantage_clip_high "
        "skip_reference_policy_logprobs_calculation calculate_advantages_on_gpu seq_logprob_error_threshold "
        "invalid_tool_call_advantage malformed_thinking_advantage val_num_generations_per_prompt "
        "deduplicate_multimodal_data debug_payload_metrics"
    ),
    "sft": f"{_STEPS} {_SUPERVISED}",
    "dpo": f"{_STEPS} {_SUPERVISED} preference_loss gt_reward_scale",
    "distillation": f"max_num_epochs {_STEPS}",
    "env.math": "math_verify_impl",
    "data": (
        f"{_DATASET} num_workers default add_bos add_generation_prompt add_system_prompt train_data_path "
        "val_data_path val_data_paths train_split val_split use_multiple_dataloader num_prompts_per_dataloader "
        "custom_dataloader input_len_or_input_len_generator"
    ),
    "data.train": _DATASET,
    "data.validation": _DATASET,
    "env": (
        "multichoice_qa code reward_model sliding_puzzle_game nemo_gym should_use_nemo_gym clevr-cogent "
        "geometry3k refcoco code_jaccard"
    ),
    "logger": ("log_dir swanlab_enabled monitor_gpus swanlab tensorboard gpu_monitoring"),
    "checkpointing": (
        "checkpoint_dir checkpoint_must_save_by model_save_format save_consolidated save_optimizer model_cache_dir "
        "model_repo_id is_peft peft_config pretrained_checkpoint ft_keep_latest_k ft_save_period "
        "save_data_plane"
    ),
    "cluster": "segment_size master_port_range_low master_port_range_high",
}
_KNOWN = {section: frozenset(names.split()) for section, names in _NAMES.items()}

_REASONS = {
    "policy.dtensor_cfg": "Megatron-Core is the only training backend",
    "policy.optimizer": "policy.megatron_cfg.optimizer is the optimizer",
    "policy.scheduler": "policy.megatron_cfg.scheduler is the schedule",
    "policy.max_grad_norm": "policy.megatron_cfg.optimizer.clip_grad limits the norm",
    "policy.megatron_cfg.converter_type": "the model's folder names its family",
    "policy.megatron_cfg.pipeline_dtype": "it follows policy.precision",
    "policy.megatron_cfg.moe_enable_deepep": "moe_flex_dispatcher_backend: deepep asks for it",
    "policy.megatron_cfg.optimizer.bf16": "it follows policy.precision",
    "policy.megatron_cfg.optimizer.fp16": "it follows policy.precision",
    "policy.megatron_cfg.optimizer.params_dtype": "it follows policy.precision",
    "policy.generation.vllm_cfg": "Megatron-Core generates, in workers laid out like the training workers",
    "grpo.async_grpo": "steps generate and train by turns",
    "data.dataset_name": "env.reasoning_gym.task generates the problems",
    "data.train.dataset_name": "env.reasoning_gym.task generates the problems",
    "data.validation.dataset_name": "env.reasoning_gym.task generates the problems",
    "logger.log_dir": "--run-dir names the place of a run",
    "checkpointing.checkpoint_dir": "--run-dir names the place of a run",
}

_OTHER_VALUES = (
    "policy.generation.backend",
    "policy.megatron_cfg.optimizer.optimizer",
    "checkpointing.metric_name",
    "data.train",
    "data.validation",
    "data.max_input_seq_length",
    "grpo.max_val_samples",
    "grpo.val_batch_size",
)
"""Keys that take other values in NeMo-RL: other engines and metrics, null, lists of data sets."""
OTHER_RULES = ("policy.megatron_cfg.enabled", "policy.max_total_sequence_length", "env.reasoning_gym.task")
"""Keys whose rules NeMo-RL does not have: another backend, responses cut at the total length, problems from files."""


def unsupported(path: str) -> str | None:
    """What to say about an unknown key; None where NeMo-RL does not know it either."""
    section, _, key = re.sub(r"^teacher\.", "policy.", path).rpartition(".")
    if key not in _KNOWN.get(section, ()):
        return None
    reason = _REASONS.get(path, "nothing reads it")
    return f"{UNSUPPORTED}: {reason}. Remove it."


def is_replaceable(path: str, message: str) -> bool:
    """Whether a default may stand in for a value that the schema refuses, in a recipe of NeMo-RL."""
    is_other_value = path in _OTHER_VALUES and NOT_ALLOWED in message
    return is_other_value or message.startswith((UNSUPPORTED, MISSING))


def adapted(values: Mapping[str, Any], defaults: Mapping[str, Any], paths: Collection[str]) -> dict[str, Any]:
    """Return ``values`` with the defaults in place of what stands at ``paths``; without those that have no default."""
    return dict(_adapted(values, defaults, paths, ""))


def _adapted(
    values: Mapping[str, Any], defaults: Mapping[str, Any], paths: Collection[str], section: str
) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        path = f"{section}.{key}".lstrip(".")
        inner = defaults.get(key)
        if path not in paths:
            below = inner if isinstance(inner, Mapping) else {}
            yield key, dict(_adapted(value, below, paths, path)) if isinstance(value, Mapping) else value
        elif key in defaults:
            yield key, inner
