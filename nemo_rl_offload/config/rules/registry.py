"""The rules that join several keys, or a key and the model, and what is not available yet."""

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

from nemo_rl_offload.config.loader import EMPTY_PATH, resolve_model_path, resolve_tokenizer_path
from nemo_rl_offload.config.rules.algorithms import ALGORITHM_RULES, ALGORITHM_RULES_OF_THIS_MACHINE
from nemo_rl_offload.config.rules.batching import BATCHING_RULES, BATCHING_WARNINGS
from nemo_rl_offload.config.rules.cuda_graphs import CUDA_GRAPH_RULES, CUDA_GRAPH_WARNINGS
from nemo_rl_offload.config.rules.effects import EFFECT_WARNINGS
from nemo_rl_offload.config.rules.megatron import MEGATRON_RULES, MEGATRON_WARNINGS, transformer_engine_is_here
from nemo_rl_offload.config.rules.mlp_recompute import MLP_RECOMPUTE_RULES, MLP_RECOMPUTE_WARNINGS
from nemo_rl_offload.config.rules.offload import OFFLOAD_RULES, OFFLOAD_WARNINGS
from nemo_rl_offload.config.rules.offload_recompute import OFFLOAD_RECOMPUTE_RULES, OFFLOAD_RECOMPUTE_WARNINGS
from nemo_rl_offload.config.rules.parallel import PARALLEL_RULES
from nemo_rl_offload.config.rules.rule import MEGATRON, Get, Rule, megatron
from nemo_rl_offload.config.rules.runs import RUN_RULES, RUN_RULES_OF_THIS_MACHINE
from nemo_rl_offload.config.rules.stash import STASH_RULES
from nemo_rl_offload.config.rules.tasks import TASK_RULES, TASK_RULES_OF_THIS_MACHINE
from nemo_rl_offload.config.rules.worker_counts import WORKER_COUNT_RULES
from nemo_rl_offload.config.rules.workers import WORKER_RULES, WORKER_WARNINGS
from nemo_rl_offload.config.shapes import read_shape
from nemo_rl_offload.errors import ConfigError

NOT_YET: dict[str, Any] = {
    "expert_tensor_parallel_size": 1,
    "cuda_graph_impl": "none",
    "optimizer.optimizer_cpu_offload": False,
}
"""Keys of `policy.megatron_cfg` whose only value so far is this one."""
LOCAL_PATHS = (
    "policy.model_name",
    "policy.tokenizer.name",
    "teacher.model_name",
    "data.train.path",
    "data.validation.path",
)


def _backend(get: Get) -> Iterator[str]:
    if not megatron(get, "enabled"):
        yield f"{MEGATRON}.enabled: must be true. Megatron-Core is the only training backend."


def _not_yet(key: str, available: Any, get: Get) -> Iterator[str]:
    value = megatron(get, key)
    if value != available:
        yield f"{MEGATRON}.{key}: {value} is not available yet. Set it to {json.dumps(available)}."


def _once_available(key: str, rule: Rule, get: Get) -> Iterator[str]:
    """What else is to be said about a key, not before its value is available."""
    if key not in NOT_YET or megatron(get, key) == NOT_YET[key]:
        yield from rule(get)


def _flex_is_not_yet(get: Get) -> Iterator[str]:
    if megatron(get, "moe_token_dispatcher_type") == "flex":
        yield f"{MEGATRON}.moe_token_dispatcher_type: flex is not available yet. Set alltoall or allgather."


def _is_not_empty(path: str, get: Get) -> Iterator[str]:
    name = get(path)
    if name is not None and not name.strip():
        yield f"{path}: {EMPTY_PATH}"


def _model_can_be_read(get: Get) -> Iterator[str]:
    name = get("policy.model_name")
    try:
        resolve_model_path(name)
    except ConfigError:  # `_model_is_here` says so
        return
    try:
        read_shape(name)
    except ConfigError as error:
        yield f"policy.model_name: {error}"


def _model_is_here(get: Get) -> Iterator[str]:
    try:
        resolve_model_path(get("policy.model_name"))
    except ConfigError as error:
        yield f"policy.model_name: {error}"


def _tokenizer_is_here(get: Get) -> Iterator[str]:
    try:
        resolve_tokenizer_path(get("policy.tokenizer.name"))
    except ConfigError as error:
        yield f"policy.tokenizer.name: {error}"


def _model_is_unknown(get: Get) -> Iterator[str]:
    try:
        read_shape(get("policy.model_name"))
    except ConfigError:
        yield "policy.model_name: rules about the model's layers were not checked, without its config.json."


RULES: tuple[Rule, ...] = (
    _backend,
    *(partial(_not_yet, key, available) for key, available in NOT_YET.items()),
    *(partial(_is_not_empty, path) for path in LOCAL_PATHS),
    *STASH_RULES,
    _flex_is_not_yet,
    _model_can_be_read,
    *OFFLOAD_RULES,
    *MLP_RECOMPUTE_RULES,
    *OFFLOAD_RECOMPUTE_RULES,
    *(partial(_once_available, "cuda_graph_impl", rule) for rule in CUDA_GRAPH_RULES),
    *MEGATRON_RULES,
    *PARALLEL_RULES,
    *WORKER_COUNT_RULES,
    *WORKER_RULES,
    *BATCHING_RULES,
    *RUN_RULES,
    *TASK_RULES,
    *ALGORITHM_RULES,
)
RULES_OF_THIS_MACHINE: tuple[Rule, ...] = (
    _model_is_here,
    _tokenizer_is_here,
    transformer_engine_is_here,
    *RUN_RULES_OF_THIS_MACHINE,
    *TASK_RULES_OF_THIS_MACHINE,
    *ALGORITHM_RULES_OF_THIS_MACHINE,
)
"""What a run needs here, and a check elsewhere does not."""
WARNINGS: tuple[Rule, ...] = (
    _model_is_unknown,
    *OFFLOAD_WARNINGS,
    *MLP_RECOMPUTE_WARNINGS,
    *OFFLOAD_RECOMPUTE_WARNINGS,
    *CUDA_GRAPH_WARNINGS,
    *MEGATRON_WARNINGS,
    *WORKER_WARNINGS,
    *BATCHING_WARNINGS,
    *EFFECT_WARNINGS,
)
