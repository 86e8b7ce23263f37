"""Rules that join several keys, or a key and the model: each is a generator of one line per problem.

A line begins with the path to change and ends with the fix. A rule reads values by their path through `get`,
which ends the rule where a value is reported already. Of the model only `config.json` is read.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nemo_rl_offload.config.loader import parse_bytes, resolve_model_path, resolve_tokenizer_path
from nemo_rl_offload.errors import ConfigError, nearest
from nemo_rl_offload.planner.modules import (
    DENSE_MLP_MODULES,
    MEGATRON_MODULES,
    MOE_MODULES,
    NATIVE_MODULES,
    SUPPORTED_MODULES,
)

Get = Callable[[str], Any]
Rule = Callable[[Get], Iterator[str]]
MEGATRON = "policy.megatron_cfg"
RECOMPUTE_MODULES = (
    "core_attn",
    "moe_act",
    "layernorm",
    "mla_up_proj",
    "mlp",
    "moe",
    "shared_experts",
    "gdn_norm_out",
)
"""Megatron-Core's names for selective recomputation."""


class ReportedError(Exception):
    """A rule read a value that is reported already."""


def _backend(get: Get) -> Iterator[str]:
    if not get(f"{MEGATRON}.enabled"):
        yield f"{MEGATRON}.enabled: must be true. Megatron-Core is the only training backend."


def _only_data_parallelism(key: str, supported: object, get: Get) -> Iterator[str]:
    value = get(f"{MEGATRON}.{key}")
    if value != supported:
        yield f"{MEGATRON}.{key}: only data parallelism so far. Set it to {json.dumps(supported)}."


def _model(get: Get) -> Iterator[str]:
    try:
        _model_shape(get("policy.model_name"))
    except ConfigError as error:
        yield f"policy.model_name: {error}"


def _tokenizer(get: Get) -> Iterator[str]:
    try:
        resolve_tokenizer_path(get("policy.tokenizer.name"))
    except ConfigError as error:
        yield f"policy.tokenizer.name: {error}"


def _model_shape(model_name: str) -> dict[str, Any]:
    path = resolve_model_path(model_name) / "config.json"
    try:
        shape = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(shape, dict):
        raise ConfigError(f"{path} does not hold a model's configuration.")
    return shape


def _layers_with_experts(shape: Mapping[str, Any]) -> list[bool]:
    """Say of each layer of a Hugging Face `config.json` whether it has experts (Qwen, DeepSeek, Mixtral)."""

    def whole(key: str, default: int) -> int:
        return value if isinstance(value := shape.get(key), int) else default

    num_experts = max(whole(key, 0) for key in ("num_experts", "num_local_experts", "n_routed_experts"))
    step = max(1, whole("decoder_sparse_step", 1))
    frequency = max(1, whole("moe_layer_freq", 1))
    listed = shape.get("mlp_only_layers")
    dense_layers = listed if isinstance(listed, list) else []
    return [
        num_experts > 0
        and (layer + 1) % step == 0
        and layer % frequency == 0
        and layer >= whole("first_k_dense_replace", 0)
        and layer not in dense_layers
        for layer in range(max(1, whole("num_hidden_layers", 1)))
    ]


def _offload_names(get: Get) -> Iterator[str]:
    path = f"{MEGATRON}.offload_modules"
    modules = get(path) or []
    for name in dict.fromkeys(modules):
        if name in SUPPORTED_MODULES:
            continue
        known = name in MEGATRON_MODULES or name in NATIVE_MODULES
        reason = "not supported yet" if known else f"unknown module.{nearest(name, SUPPORTED_MODULES)}"
        yield f"{path}: '{name}': {reason.rstrip('.')}. Allowed: {', '.join(SUPPORTED_MODULES)}."
    for name in sorted({name for name in modules if modules.count(name) > 1}):
        yield f"{path}: '{name}' is listed more than once. List it once."
    if "attn_proj" in modules and "core_attn" not in modules:
        yield f"{path}: 'attn_proj' needs 'core_attn'. Add core_attn, or remove attn_proj."


def _offload_needs_modules(get: Get) -> Iterator[str]:
    if get(f"{MEGATRON}.fine_grained_activation_offloading") and not get(f"{MEGATRON}.offload_modules"):
        yield (
            f"{MEGATRON}.offload_modules: empty, but fine_grained_activation_offloading is true. "
            "List modules, like [core_attn, mlp_norm], or turn offloading off."
        )


def _offload_fits_model(get: Get) -> Iterator[str]:
    path = f"{MEGATRON}.offload_modules"
    modules = get(path) or []
    if not get(f"{MEGATRON}.fine_grained_activation_offloading"):
        return
    try:
        experts = _layers_with_experts(_model_shape(get("policy.model_name")))
    except ConfigError as error:  # `_model` says so
        raise ReportedError from error
    for name in modules:
        if name in MOE_MODULES and not any(experts):
            yield f"{path}: '{name}' needs layers with experts, and the model has none. Remove it."
        if name in DENSE_MLP_MODULES and all(experts):
            yield f"{path}: '{name}' needs layers without experts, and the model has none. Remove it."


def _offload_or_recompute(get: Get) -> Iterator[str]:
    modules = get(f"{MEGATRON}.offload_modules") or []
    is_offloading = get(f"{MEGATRON}.fine_grained_activation_offloading")
    recomputed = get(f"{MEGATRON}.recompute_modules") or []
    is_selective = get(f"{MEGATRON}.recompute_granularity") == "selective"
    if not (is_offloading and is_selective and "moe" in recomputed):
        return
    for name in modules:
        if name in MOE_MODULES:
            yield (
                f"{MEGATRON}.offload_modules: '{name}' saves nothing while recompute_modules has 'moe'. "
                "Remove one of the two."
            )


def _host_memory_budget(get: Get) -> Iterator[str]:
    path = f"{MEGATRON}.activation_offload.host_memory_budget"
    budget = get(path)
    try:
        if isinstance(budget, str):
            parse_bytes(budget)
    except ConfigError as error:
        yield f"{path}: {error} Or give a share of the node's free memory, above 0 up to 1."


def _recompute(get: Get) -> Iterator[str]:
    granularity = get(f"{MEGATRON}.recompute_granularity")
    num_layers = get(f"{MEGATRON}.recompute_num_layers")
    if granularity == "full" and get(f"{MEGATRON}.recompute_method") is None:
        yield f"{MEGATRON}.recompute_method: full recompute needs it. Set uniform or block."
    if granularity == "full" and num_layers is None:
        yield f"{MEGATRON}.recompute_num_layers: full recompute needs it. Set 1 or more."
    if granularity == "selective" and num_layers is not None:
        yield f"{MEGATRON}.recompute_num_layers: selective recompute covers all layers. Set null."


def _recompute_names(get: Get) -> Iterator[str]:
    path = f"{MEGATRON}.recompute_modules"
    for name in get(path) or []:
        if name not in RECOMPUTE_MODULES:
            hint = nearest(name, RECOMPUTE_MODULES)
            yield f"{path}: '{name}': unknown module.{hint} Allowed: {', '.join(RECOMPUTE_MODULES)}."


def _micro_batches(get: Get) -> Iterator[str]:
    whole, micro = get("policy.train_global_batch_size"), get("policy.train_micro_batch_size")
    if whole % micro:
        yield (
            f"policy.train_global_batch_size: {whole} is not a multiple of train_micro_batch_size {micro}. "
            "Change one of them."
        )


def _samples_per_step(get: Get) -> Iterator[str]:
    whole = get("policy.train_global_batch_size")
    prompts, generations = get("grpo.num_prompts_per_step"), get("grpo.num_generations_per_prompt")
    if (prompts * generations) % whole:
        yield (
            f"policy.train_global_batch_size: {whole} does not divide the samples of a step, "
            f"grpo.num_prompts_per_step x num_generations_per_prompt = {prompts} x {generations}. "
            f"Set {prompts * generations} for one update per step."
        )


def _leave_one_out(get: Get) -> Iterator[str]:
    if get("grpo.use_leave_one_out_baseline") and get("grpo.num_generations_per_prompt") < 2:
        yield (
            "grpo.num_generations_per_prompt: must be at least 2 while use_leave_one_out_baseline is true. "
            "Raise it, or turn the baseline off."
        )


def _lengths(get: Get) -> Iterator[str]:
    prompt, response = get("data.max_input_seq_length"), get("policy.generation.max_new_tokens")
    total = get("policy.max_total_sequence_length")
    if prompt + response > total:
        yield (
            f"policy.max_total_sequence_length: {total} is less than data.max_input_seq_length {prompt} + "
            f"policy.generation.max_new_tokens {response}. Set at least {prompt + response}."
        )


def _learning_rate(get: Get) -> Iterator[str]:
    path = f"{MEGATRON}.optimizer"
    highest = get(f"{path}.lr")
    for lower in (f"{path}.min_lr", f"{MEGATRON}.scheduler.lr_warmup_init"):
        if get(lower) > highest:
            yield f"{lower}: {get(lower)} is above optimizer.lr {highest}. Lower it."


def _warmup(get: Get) -> Iterator[str]:
    path = f"{MEGATRON}.scheduler"
    warmup = get(f"{path}.lr_warmup_iters")
    decay = get(f"{path}.lr_decay_iters") or get("grpo.max_num_steps")
    if get(f"{path}.lr_decay_style") != "constant" and warmup >= decay:
        yield (
            f"{path}.lr_warmup_iters: {warmup} is not below lr_decay_iters, {decay} "
            "(null: grpo.max_num_steps). Lower it."
        )


def _overlap(get: Get) -> Iterator[str]:
    ddp = f"{MEGATRON}.distributed_data_parallel_config"
    if not get(f"{ddp}.overlap_param_gather"):
        return
    for needed in (f"{MEGATRON}.optimizer.use_distributed_optimizer", f"{ddp}.overlap_grad_reduce"):
        if not get(needed):
            yield f"{ddp}.overlap_param_gather: needs {needed}. Set that to true, or this to false."


def _prompt_template(get: Get) -> Iterator[str]:
    template = get("data.prompt_template")
    if template is not None and "{question}" not in template:
        yield "data.prompt_template: has no place for the question. Put {question} into it."


def _task(get: Get) -> Iterator[str]:
    task = get("env.reasoning_gym.task")
    names = task_names()
    if task not in names:
        hint = nearest(task, names) or f" Some of them: {', '.join(sorted(names)[:5])}."
        yield f"env.reasoning_gym.task: '{task}' is none of reasoning-gym's {len(names)} tasks.{hint}"


@cache
def task_names() -> set[str]:
    """Return the names of reasoning-gym's data sets, read from its sources: importing it takes seconds."""
    package = find_spec("reasoning_gym")
    assert package is not None
    assert package.submodule_search_locations
    declared = re.compile(r'^(?:DATASET_NAME\s*=|register_dataset\()\s*"(\w+)"', re.MULTILINE)
    sources = Path(package.submodule_search_locations[0]).rglob("*.py")
    return {name for source in sources for name in declared.findall(source.read_text(encoding="utf-8"))}


def _offload_is_off(get: Get) -> Iterator[str]:
    if get(f"{MEGATRON}.offload_modules") and not get(f"{MEGATRON}.fine_grained_activation_offloading"):
        yield (
            f"{MEGATRON}.offload_modules: ignored, because fine_grained_activation_offloading is false. "
            "Set that to true to offload."
        )


def _recompute_is_off(get: Get) -> Iterator[str]:
    unused = {None: ("modules", "method", "num_layers"), "selective": ("method",), "full": ("modules",)}
    granularity = get(f"{MEGATRON}.recompute_granularity")
    for key in unused[granularity]:
        if get(f"{MEGATRON}.recompute_{key}") is not None:
            yield f"{MEGATRON}.recompute_{key}: ignored with recompute_granularity {granularity or 'null'}."


RULES: tuple[Rule, ...] = (
    _backend,
    *(
        partial(_only_data_parallelism, f"{kind}_parallel_size", 1)
        for kind in ("tensor_model", "pipeline_model", "context", "expert_model")
    ),
    partial(_only_data_parallelism, "sequence_parallel", False),
    _model,
    _tokenizer,
    _offload_names,
    _offload_needs_modules,
    _offload_fits_model,
    _offload_or_recompute,
    _host_memory_budget,
    _recompute,
    _recompute_names,
    _micro_batches,
    _samples_per_step,
    _leave_one_out,
    _lengths,
    _learning_rate,
    _warmup,
    _overlap,
    _prompt_template,
    _task,
)
WARNINGS: tuple[Rule, ...] = (_offload_is_off, _recompute_is_off)
