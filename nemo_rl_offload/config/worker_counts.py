"""What the number of workers must be divided by.

Checked with the rest of a configuration where that names the number, and by the policy when the workers are there:
`cluster.gpus_per_node: auto` finds them.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from nemo_rl_offload.config.batching_rules import is_by_tokens
from nemo_rl_offload.config.rule import MEGATRON, Get, Rule, megatron
from nemo_rl_offload.config.run_rules import GENERATES
from nemo_rl_offload.errors import ConfigError

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
            f"{_nearest_multiple(world_size, num_together)}."
        )
    num_shards: int = world_size // num_together
    num_ranks, num_expert_ranks = num_shards * num_alike, cfg["expert_model_parallel_size"]
    if num_ranks % num_expert_ranks:
        raise ConfigError(
            f"{MEGATRON}.expert_model_parallel_size: {num_expert_ranks} does not divide the {num_ranks} worker(s) of a "
            "pipeline stage. Change it, or the number of workers."
        )
    return num_shards


def check_batches(cfg: Mapping[str, Any], global_batch_size: int, micro_batch_size: int, num_shards: int) -> None:
    """Raise ConfigError when a global batch cannot be cut into whole microbatches of samples over the shards."""
    multiple, num_stages = num_shards * micro_batch_size, cfg["pipeline_model_parallel_size"]
    path = "policy.train_global_batch_size"
    if global_batch_size % multiple:
        raise ConfigError(
            f"{path}: {global_batch_size} is not a multiple of train_micro_batch_size x data-parallel ranks = "
            f"{micro_batch_size} x {num_shards} = {multiple}. The nearest that is: "
            f"{_nearest_multiple(global_batch_size, multiple)}."
        )
    num_microbatches = global_batch_size // multiple
    if cfg["virtual_pipeline_model_parallel_size"] and num_microbatches % num_stages:
        raise ConfigError(
            f"{path}: with virtual_pipeline_model_parallel_size, a step's {num_microbatches} microbatches must be a "
            f"multiple of the {num_stages} pipeline ranks. Set it to a multiple of {multiple * num_stages}."
        )


def _nearest_multiple(number: int, of: int) -> int:
    return max(1, round(number / of)) * of


def _worker_counts(get: Get) -> Iterator[str]:
    if get("cluster.gpus_per_node") == "auto":
        return
    num_training, num_generating = _training_and_generating(get)
    if num_training < 1:  # another rule says so
        return
    cfg = {key: megatron(get, key) for key in SIZES}
    whole, micro = get("policy.train_global_batch_size"), get("policy.train_micro_batch_size")
    try:
        num_shards = data_parallel_size(cfg, num_training)
        if num_generating:
            data_parallel_size(cfg, num_generating)
        if whole % micro == 0 and not is_by_tokens(get):
            check_batches(cfg, whole, micro, num_shards)
    except ConfigError as error:
        yield str(error)


def _training_and_generating(get: Get) -> tuple[int, int]:
    """Workers of each; as `VirtualCluster.split` divides them."""
    num_nodes, per_node = get("cluster.num_nodes"), get("cluster.gpus_per_node")
    path = "policy.generation.colocated"
    if get("algorithm") not in GENERATES or get(f"{path}.enabled"):
        return num_nodes * per_node, 0
    if num_nodes > 1:
        generating = (get(f"{path}.resources.num_nodes") or num_nodes) * per_node
    else:
        generating = get(f"{path}.resources.gpus_per_node") or per_node
    return num_nodes * per_node - generating, generating


WORKER_COUNT_RULES: tuple[Rule, ...] = (_worker_counts,)
