"""From the configuration to microbatches: a fixed number of samples, or a number of tokens, padded or packed."""

from functools import partial
from typing import Literal

from nemo_rl_offload.batching.batch import Batch
from nemo_rl_offload.batching.plan import TokenBudget, plan_packed, plan_padded
from nemo_rl_offload.batching.sharding import ShardedBatch, shard_by_plan, shard_evenly
from nemo_rl_offload.config.schema import DynamicBatchingConfig, PolicyConfig
from nemo_rl_offload.specs.parallel_layout import sequence_multiple, width_multiple


def is_planned(policy: PolicyConfig) -> bool:
    """Whether microbatches are numbers of tokens."""
    return policy["dynamic_batching"]["enabled"] or policy["sequence_packing"]["enabled"]


def shard_for_ranks(
    batch: Batch,
    policy: PolicyConfig,
    num_shards: int,
    phase: Literal["train", "logprob"],
    rows_per_sample: int = 1,
) -> ShardedBatch:
    """Divide a batch among the data-parallel ranks; where microbatches are numbers of tokens, into those too."""
    dynamic, packing = policy["dynamic_batching"], policy["sequence_packing"]
    if packing["enabled"]:
        budget = _budget(packing, policy, num_shards, phase)
        plan = partial(plan_packed, budget=budget, algorithm=packing["algorithm"])
        return shard_by_plan(batch, rows_per_sample, plan, is_packed=True)
    if dynamic["enabled"]:
        plan = partial(plan_padded, budget=_budget(dynamic, policy, num_shards, phase))
        return shard_by_plan(batch, rows_per_sample, plan, is_packed=False)
    return shard_evenly(batch, num_shards, rows_per_sample)


def _budget(
    section: DynamicBatchingConfig, policy: PolicyConfig, num_shards: int, phase: Literal["train", "logprob"]
) -> TokenBudget:
    cfg = policy["megatron_cfg"]
    num_stages = cfg["pipeline_model_parallel_size"]
    num_expert_ranks = cfg["expert_model_parallel_size"] * cfg["expert_tensor_parallel_size"]
    gathers = num_expert_ranks > 1 and cfg["moe_token_dispatcher_type"] == "allgather"
    sizes = cfg["tensor_model_parallel_size"] if cfg["sequence_parallel"] else 1, cfg["context_parallel_size"]
    fp8_recipe = cfg["fp8_cfg"]["fp8_recipe"] if cfg["fp8_cfg"]["enabled"] else None
    return TokenBudget(
        num_tokens=section["train_mb_tokens"] if phase == "train" else section["logprob_mb_tokens"],
        length_round=section["sequence_length_round"],
        width_multiple=width_multiple(*sizes, fp8_recipe),
        num_ranks=num_shards,
        group_size=num_stages if cfg["virtual_pipeline_model_parallel_size"] else 1,
        one_shape=num_stages > 1 or gathers,
        sequence_multiple=sequence_multiple(*sizes),
    )
