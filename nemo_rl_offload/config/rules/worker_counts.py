"""What the number of workers must be divided by.

Checked with the rest of a configuration where that names the number, and by the policy when the workers are there:
`cluster.gpus_per_node: auto` finds them.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from nemo_rl_offload.config.rules.batching import is_by_tokens
from nemo_rl_offload.config.rules.rule import MEGATRON, Get, Rule, algorithm_spec, megatron
from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.specs.parallel_layout import nearest_multiple, num_microbatches

SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
)


def data_parallel_size(cfg: Mapping[str, Any], world_size: int) -> int:
    """How many shards a batch is cut into. `cfg` is `policy.megatron_cfg`, or its `SIZES`.

    Raises ConfigError when the ranks do not divide among the parallel sizes.
    """
    num_alike = cfg["tensor_model_parallel_size"] * cfg["context_parallel_size"]
    num_together = num_alike * cfg["pipeline_model_parallel_size"]
    if world_size % num_together:
        raise ConfigError(
            "cluster.gpus_per_node: tensor_model_parallel_size x pipeline_model_parallel_size x context_parallel_size "
            f"= {num_together} does not divide {world_size} worker(s). Change these sizes, or take "
            f"{nearest_multiple(world_size, num_together)}."
        )
    num_shards: int = world_size // num_together
    num_ranks, num_expert_ranks = num_shards * num_alike, cfg["expert_model_parallel_size"]
    if num_ranks % num_expert_ranks:
        raise ConfigError(
            f"{MEGATRON}.expert_model_parallel_size: {num_expert_ranks} does not divide the {num_ranks} worker(s) of a "
            "pipeline stage. Change it, or the number of workers."
        )
    return num_shards


def num_interleaved(cfg: Mapping[str, Any]) -> int:
    """Of how many microbatches a step's number must be a multiple. `cfg` is as for `data_parallel_size`."""
    return cfg["pipeline_model_parallel_size"] if cfg["virtual_pipeline_model_parallel_size"] else 1


def training_and_generating(colocated: Mapping[str, Any], num_nodes: int, per_node: int) -> tuple[int, int]:
    """Workers of each, by `policy.generation.colocated`; as `VirtualCluster.split` divides them."""
    generating = 0
    if not colocated["enabled"]:
        resources = colocated["resources"]
        generating = (resources["num_nodes"] or 0) * per_node if num_nodes > 1 else resources["gpus_per_node"] or 0
    return num_nodes * per_node - generating, generating


def _worker_counts(get: Get) -> Iterator[str]:
    num_nodes, per_node = get("cluster.num_nodes"), get("cluster.gpus_per_node")
    if per_node == "auto":
        return
    colocated = get("policy.generation.colocated")
    if not algorithm_spec(get).generates:
        colocated = {"enabled": True}
    num_training, num_generating = training_and_generating(colocated, num_nodes, per_node)
    if num_training < 1 or not (colocated["enabled"] or num_generating):  # another rule says so
        return
    cfg = {key: megatron(get, key) for key in SIZES}
    whole, micro = get("policy.train_global_batch_size"), get("policy.train_micro_batch_size")
    try:
        num_shards = data_parallel_size(cfg, num_training)
        if num_generating:
            data_parallel_size(cfg, num_generating)
        if whole % micro == 0 and not is_by_tokens(get):
            num_microbatches(whole, micro, num_shards, num_interleaved(cfg))
    except ConfigError as error:
        yield str(error)


WORKER_COUNT_RULES: tuple[Rule, ...] = (_worker_counts,)
