"""Warnings about settings that nothing reads: with this algorithm, or while another key has the value that it has.

A value equal to the default was not set, so nothing is said about it; nor about one that an inherited file has set.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from operator import attrgetter
from typing import Any, is_typeddict

from nemo_rl_offload.config.algorithms import ALGORITHMS, AlgorithmSpec
from nemo_rl_offload.config.environments import ENVIRONMENTS, PROBLEMS
from nemo_rl_offload.config.full_schema import plugin_defaults
from nemo_rl_offload.config.loader import BASE
from nemo_rl_offload.config.rules.batching import BY_TOKENS
from nemo_rl_offload.config.rules.rule import MEGATRON, Get, Rule, algorithm_has, algorithm_spec
from nemo_rl_offload.config.rules.tasks import SPLITS, takes_problems, validates
from nemo_rl_offload.config.schema import AsyncGRPOConfig, ChatConfig, Fp8Config, PeftConfig, VllmConfig
from nemo_rl_offload.config.types import keys_of
from nemo_rl_offload.specs.documents import read_yaml

_LEAVES = "policy.offload_optimizer_for_logprob"
_IS_READ: dict[str, Callable[[AlgorithmSpec], bool]] = {
    "teacher": attrgetter("needs_teacher"),
    **dict.fromkeys(
        ("policy.generation", "policy.generation_batch_size", "data.env_name", "data.max_input_seq_length"),
        attrgetter("generates"),
    ),
    **dict.fromkeys(
        tuple(f"logger.{key}" for key in ("num_val_samples_to_print", "num_samples_to_keep", "sample_period")),
        attrgetter("generates"),
    ),
    **dict.fromkeys(("data.add_bos", "data.add_eos"), lambda spec: not spec.generates),
    **dict.fromkeys(
        ("policy.logprob_batch_size", *(f"policy.{name}.logprob_mb_tokens" for name in BY_TOKENS)),
        attrgetter("has_logprob_passes"),
    ),
    _LEAVES: lambda spec: spec.has_logprob_passes and not spec.needs_teacher,
}
"""Whether an algorithm reads a key, or a section where the key itself is not listed; all do where neither is."""

_OF_FILES = ("split", "input_key", "output_key", "max_samples", "split_validation_size", "repeat", "further")
"""Keys of a data set that is read from files."""
_TOKENS = ("train_mb_tokens", "logprob_mb_tokens", "sequence_length_round")
_COLOCATED, _SHAPING, _OPTIMIZER = "policy.generation.colocated", "grpo.reward_shaping", f"{MEGATRON}.optimizer"
_HOST_BUDGET = f"{MEGATRON}.activation_offload.host_memory_budget"
_ADAPTERS = f"{MEGATRON}.peft.enabled"
_ESTIMATOR = "grpo.adv_estimator.name"
_PRINTED = "logger.num_val_samples_to_print"
_VALIDATION = tuple(f"policy.generation.val_{key}" for key in ("temperature", "top_p", "top_k"))
_PENALTY = "loss_fn.reference_policy_kl_penalty"
_OF_THE_PENALTY = tuple(
    f"loss_fn.{key}"
    for key in (
        *("reference_policy_kl_type", "kl_input_clamp_value", "kl_output_clamp_value"),
        *("use_kl_in_reward", "use_on_policy_kl_approximation"),
    )
)
_OF_LED_EPISODES = (
    *("grpo.invalid_tool_call_advantage", "grpo.malformed_thinking_advantage"),
    *(f"policy.generation.vllm_cfg.{key}_parser_plugin" for key in ("tool", "reasoning")),
    *(f"policy.generation.vllm_cfg.http_server_serving_chat_kwargs.{key}" for key in keys_of(ChatConfig)),
)
_SWITCHES: tuple[tuple[str, tuple[Any, ...], tuple[str, ...]], ...] = (
    (_ADAPTERS, (True,), tuple(f"{MEGATRON}.peft.{key}" for key in keys_of(PeftConfig) if key != "enabled")),
    (
        f"{MEGATRON}.fp8_cfg.enabled",
        (True,),
        (
            *(f"{MEGATRON}.fp8_cfg.{key}" for key in keys_of(Fp8Config) if key != "enabled"),
            f"{MEGATRON}.first_last_layers_bf16",
        ),
    ),
    (
        f"{MEGATRON}.first_last_layers_bf16",
        (True,),
        tuple(f"{MEGATRON}.num_layers_at_{end}_in_bf16" for end in ("start", "end")),
    ),
    (
        "policy.generation.vllm_cfg.precision",
        ("fp8",),
        tuple(
            f"policy.generation.vllm_cfg.{key}"
            for key in (
                *("use_deep_gemm", "num_first_layers_in_bf16", "num_last_layers_in_bf16"),
                *("quantization_ignored_layer_kws", "is_mx"),
            )
        ),
    ),
    (f"{MEGATRON}.scheduler.lr_decay_style", ("linear", "cosine"), (f"{_OPTIMIZER}.min_lr",)),
    (f"{_OPTIMIZER}.optimizer", ("sgd",), (f"{_OPTIMIZER}.sgd_momentum",)),
    (f"{_OPTIMIZER}.optimizer", ("adam",), tuple(f"{_OPTIMIZER}.adam_{key}" for key in ("beta1", "beta2", "eps"))),
    (
        f"{_COLOCATED}.enabled",
        (False,),
        tuple(f"{_COLOCATED}.resources.{key}" for key in ("gpus_per_node", "num_nodes")),
    ),
    (
        "loss_fn.use_importance_sampling_correction",
        (True,),
        tuple(f"loss_fn.truncated_importance_sampling_{key}" for key in ("type", "ratio", "ratio_min")),
    ),
    (
        "grpo.async_grpo.enabled",
        (True,),
        tuple(f"grpo.async_grpo.{key}" for key in keys_of(AsyncGRPOConfig) if key != "enabled"),
    ),
    ("loss_fn.kl_type", ("mixed",), ("loss_fn.mixed_kl_weight",)),
    ("grpo.use_dynamic_sampling", (True,), ("grpo.batch_multiplier", "grpo.dynamic_sampling_max_gen_batches")),
    (
        f"{_SHAPING}.enabled",
        (True,),
        tuple(
            f"{_SHAPING}.{key}" for key in ("max_response_length", "overlong_buffer_length", "overlong_buffer_penalty")
        ),
    ),
    (
        "grpo.reward_scaling.enabled",
        (True,),
        tuple(f"grpo.reward_scaling.{key}" for key in ("source_min", "source_max", "target_min", "target_max")),
    ),
    (_ESTIMATOR, ("reinforce_plus_plus",), ("grpo.adv_estimator.minus_baseline",)),
    (_ESTIMATOR, ("gdpo",), ("grpo.adv_estimator.reward_weights",)),
    *(
        (f"loss_fn.{switch}", (False,), ("loss_fn.ratio_clip_min", "loss_fn.ratio_clip_max"))
        for switch in ("disable_ppo_ratio", "force_on_policy_ratio")
    ),
    *(
        (f"policy.{name}.enabled", (True,), tuple(f"policy.{name}.{key}" for key in keys))
        for name, keys in (("dynamic_batching", _TOKENS), ("sequence_packing", ("algorithm", *_TOKENS)))
    ),
    (
        f"{MEGATRON}.moe_paged_stash",
        (True,),
        tuple(
            f"{MEGATRON}.moe_paged_stash_{key}"
            for key in ("page_size", "buffer_size_factor_cuda", "buffer_size_factor_cpu")
        ),
    ),
    (
        f"{MEGATRON}.fine_grained_activation_offloading",
        (True,),
        (
            f"{MEGATRON}.activation_offload.engine",
            _HOST_BUDGET,
            *(f"{MEGATRON}.{key}" for key in ("activation_offload_fraction", "delta_offload_bytes_across_pp_ranks")),
            f"{MEGATRON}.fine_grained_offloading_max_inflight_offloads",
        ),
    ),
    (f"{MEGATRON}.activation_offload.engine", ("native",), (_HOST_BUDGET,)),
    (f"{MEGATRON}.cpu_offloading", (True,), (f"{MEGATRON}.cpu_offloading_num_layers",)),
    (
        f"{MEGATRON}.cpu_affinity.enabled",
        (True,),
        (f"{MEGATRON}.cpu_affinity.bind_memory", f"{MEGATRON}.cpu_affinity.map"),
    ),
    (
        "data.prompt_template",
        (None,),
        ("policy.tokenizer.chat_template", "policy.tokenizer.chat_template_kwargs", "data.add_eos"),
    ),
    (
        "policy.generation.backend",
        ("vllm",),
        (
            "policy.generation.vllm_kwargs",
            *(
                f"policy.generation.vllm_cfg.{key}"
                for key, declared in keys_of(VllmConfig).items()
                if not is_typeddict(declared)
            ),
        ),
    ),
    ("policy.generation.backend", ("megatron",), ("policy.generation_batch_size",)),
    ("logger.wandb_enabled", (True,), ("logger.wandb.project", "logger.wandb.name")),
    ("logger.swanlab_enabled", (True,), ("logger.swanlab.project", "logger.swanlab.name")),
    (
        "logger.monitor_gpus",
        (True,),
        tuple(f"logger.gpu_monitoring.{key}_interval" for key in ("collection", "flush")),
    ),
    (
        "logger.mlflow_enabled",
        (True,),
        tuple(f"logger.mlflow.{key}" for key in ("experiment_name", "run_name", "tracking_uri")),
    ),
    (
        "checkpointing.enabled",
        (True,),
        tuple(f"checkpointing.{key}" for key in ("save_period", "keep_top_k", "save_optimizer", "is_async")),
    ),
)
"""A key, the switch; and keys that are read only while it has one of these values."""
_UNREAD: tuple[tuple[str, Any, str], ...] = (
    (f"{MEGATRON}.pipeline_model_parallel_size", 1, f"{MEGATRON}.batch_p2p_comm"),
    (f"{MEGATRON}.cuda_graph_impl", "none", f"{MEGATRON}.cuda_graph_warmup_steps"),
    ("logger.num_samples_to_keep", 0, "logger.sample_period"),
    *((_VALIDATION[0], 0, path) for path in _VALIDATION[1:]),
    *(
        (_ESTIMATOR, "reinforce_plus_plus", f"grpo.{key}")
        for key in ("normalize_rewards", "use_leave_one_out_baseline")
    ),
    ("loss_fn.use_kl_in_reward", True, "loss_fn.use_on_policy_kl_approximation"),
    (f"{_OPTIMIZER}.optimizer_cpu_offload", False, f"{_OPTIMIZER}.optimizer_offload_fraction"),
)
"""A key, its value with which nothing reads the other key, and that; no other value is to be advised for that alone."""


def _not_of_the_algorithm(get: Get) -> Iterator[str]:
    causes: dict[str, list[str]] = {}
    for path in defaults():
        if _is_read(path, get) or _is_default(path, get) or (path == _PRINTED and get(path) == 0):
            continue  # NeMo-RL's recipes ask for no samples where there are none
        cause = _cause(path, get)
        if cause.startswith("with "):
            yield f"{path}: {_shown(get(path))} has no effect {cause}."
        else:
            causes.setdefault(cause, []).append(path)
    for cause, paths in causes.items():
        yield f"{_no_effect(paths, get)} {cause}."


def _cause(path: str, get: Get) -> str:
    """Why the algorithm does not read a key."""
    spec, of_problems = algorithm_spec(get), path.startswith(("env.", *(f"{split}." for split in SPLITS)))
    if of_problems and spec.generates:
        return f"while data.env_name is {get('data.env_name')}"
    if spec.learns_from == "conversations" and path.startswith((*SPLITS, f"env.{PROBLEMS}.")):
        return f"while data.train.path is {'null' if path.endswith(_OF_FILES) else 'given'}"
    return f"with algorithm {spec.name}"


def _no_effect(paths: Sequence[str], get: Get) -> str:
    first, *others = paths
    return f"{first}: {_shown(get(first))} has no effect{', nor have ' + ', '.join(others) if others else ''}"


def _is_read(path: str, get: Get) -> bool:
    spec = algorithm_spec(get)
    section, _, key = path.partition(".")
    if path in [f"{split}.{name}" for split in SPLITS for name in _OF_FILES]:
        return not takes_problems(get)
    if section == "env" and not key.startswith(f"{PROBLEMS}."):
        return bool(spec.generates and key.startswith(f"{get('data.env_name')}."))
    if path in [f"{split}.seed" for split in SPLITS] and not takes_problems(get):
        split = path.removesuffix(".seed")
        return bool(get(f"{split}.max_samples") or (split == SPLITS[0] and get(f"{split}.split_validation_size")))
    if section == "env" or path in [f"{split}.{name}" for split in SPLITS for name in ("seed", "size", "exclude")]:
        return takes_problems(get)
    if section in ALGORITHMS:
        return section == spec.name
    if section == "loss_fn":
        return key in spec.loss_fn_keys
    while path and path not in _IS_READ:
        path = path.rpartition(".")[0]
    return not path or _IS_READ[path](spec)


def _switched_off(switch: str, values: tuple[Any, ...], paths: tuple[str, ...], get: Get) -> Iterator[str]:
    unread = [path for path in paths if _is_read(path, get) and not _is_default(path, get)]
    if _HOST_BUDGET in unread and _waits_on_host(get):
        unread.remove(_HOST_BUDGET)
    if not unread or get(switch) in values:
        return
    this = f", or this to {_shown(_default(unread[0], get))}" if len(unread) == 1 else ""
    yield (
        f"{_no_effect(unread, get)} while {switch} is {_shown(get(switch))}. "
        f"Set that to {' or '.join(map(_shown, values))}{this}."
    )


def _waits_on_host(get: Get) -> bool:
    """Whether anything else than activations does, so that the budget is read."""
    spec = algorithm_spec(get)
    sections = {name: get(name) for name in ("policy", "loss_fn", spec.name)}
    others = any(map(get, (f"{_OPTIMIZER}.optimizer_cpu_offload", _LEAVES)))
    return spec.needs_teacher or spec.copies_reference(sections) or others


def _nothing_leaves(get: Get) -> Iterator[str]:
    """All of the optimizer waits on the host in any case; gradients leave as well where they are kept otherwise."""
    switch, frees = f"{_OPTIMIZER}.optimizer_cpu_offload", f"{MEGATRON}.empty_unused_memory_level"
    is_asked = _is_read(_LEAVES, get) and get(_LEAVES)
    if is_asked and get(switch) and get(f"{_OPTIMIZER}.optimizer_offload_fraction") == 1 and get(frees) >= 1:
        yield f"{_LEAVES}: true has no effect while {switch} keeps all of the optimizer there. Set it to false."


def _nobody_leads(get: Get) -> Iterator[str]:
    leaders = tuple(name for name, spec in ENVIRONMENTS.items() if spec.leads_episodes)
    yield from _switched_off("data.env_name", leaders, _OF_LED_EPISODES, get)


def _has_one_turn(get: Get) -> Iterator[str]:
    environments = tuple(name for name, spec in ENVIRONMENTS.items() if spec.several_turns)
    if algorithm_has("max_rollout_turns", get):
        yield from _switched_off("data.env_name", environments, (f"{get('algorithm')}.max_rollout_turns",), get)


def _is_default(path: str, get: Get) -> bool:
    """Whether the user has not written it: it has its default, or stands in an inherited file."""
    return path in getattr(get, "inherited", ()) or bool(get(path) == _default(path, get))


def _default(path: str, get: Get) -> Any:
    """As `base.yaml` writes it; another key's value, or the product of several, where it writes that."""
    written = defaults()[path]
    if isinstance(written, str) and written.startswith("${mul:"):
        return math.prod(get(key) for key in re.findall(r"\$\{([\w.]+)\}", written))
    same = re.fullmatch(r"\$\{([\w.]+)\}", written) if isinstance(written, str) else None
    return get(same[1]) if same else written


def _penalty_is_none(get: Get) -> Iterator[str]:
    paths = [path for path in _OF_THE_PENALTY if _is_read(path, get) and not _is_default(path, get)]
    if paths and not get(_PENALTY):
        this = f"set this to {_shown(_default(paths[0], get))}" if len(paths) == 1 else "leave them out"
        yield f"{_no_effect(paths, get)} while {_PENALTY} is 0. Raise that, or {this}."


def _metric_is_not_measured(get: Get) -> Iterator[str]:
    path, algorithm = "checkpointing.metric_name", get("algorithm")
    metric = get(path)
    if metric is not None and metric.startswith("val:") and metric != defaults()[path] and not validates(get):
        yield (
            f"{path}: {metric} has no effect while validation is off: the latest checkpoints are kept. Set "
            f"{algorithm}.val_at_end=true, or this to train:loss."
        )


def _checkpoints_go_unmeasured(get: Get) -> Iterator[str]:
    """A checkpoint is ranked by the validation of its own step."""
    path, name = "checkpointing.save_period", get("algorithm")
    metric, save_period = get("checkpointing.metric_name"), get(path)
    val_period, last = get(f"{name}.val_period"), get(f"{name}.max_num_steps")
    is_ranked = get("checkpointing.enabled") and get("checkpointing.keep_top_k") and (metric or "").startswith("val:")
    if is_ranked and val_period and save_period % val_period and save_period < last:
        nearest = math.ceil(save_period / val_period) * val_period
        fix = f"Set it to {nearest}" if nearest < last else f"Set {name}.val_period to {save_period}"
        yield (
            f"{path}: {save_period} is no multiple of {name}.val_period, {val_period}: checkpoints of steps without a "
            f"validation are ranked behind all others. {fix}, or set checkpointing.metric_name=null."
        )


def _gpus_of_other_machines(get: Get) -> Iterator[str]:
    path, num_nodes = "logger.monitor_gpus", get("cluster.num_nodes")
    if get(path) and num_nodes > 1:
        yield f"{path}: has no effect on {num_nodes - 1} of {num_nodes} machines: GPUs of the driver's alone are read."


def _validation_is_not_sampled(get: Get) -> Iterator[str]:
    keys = [
        *_VALIDATION,
        *(path for path in (f"{get('algorithm')}.val_num_generations_per_prompt",) if path in defaults()),
    ]
    paths = [path for path in keys if _is_read(path, get) and not _is_default(path, get)]
    if paths and not validates(get):
        yield (
            f"{_no_effect(paths, get)} while validation is off. Set {get('algorithm')}.val_at_end=true, or leave "
            f"{'this' if len(paths) == 1 else 'them'} out."
        )


def _unread(switch: str, value: Any, path: str, get: Get) -> Iterator[str]:
    if get(switch) == value and not _is_default(path, get):
        yield f"{_no_effect([path], get)} while {switch} is {_shown(value)}. Set this to {_shown(_default(path, get))}."


def _schedule_has_no_such_phase(get: Get) -> Iterator[str]:
    scheduler = f"{MEGATRON}.scheduler"
    if get(f"{scheduler}.lr_warmup_init") and not get(f"{scheduler}.lr_warmup_iters"):
        yield f"{scheduler}.lr_warmup_init: has no effect without a warm-up. Set lr_warmup_iters, or this to 0.0."
    styles = [get(f"{scheduler}.{key}") for key in ("lr_decay_style", "weight_decay_incr_style")]
    weight_decays = [get(f"{scheduler}.{key}_weight_decay") for key in ("start", "end")]
    is_decayed = any(value not in (None, get(f"{_OPTIMIZER}.weight_decay")) for value in weight_decays)
    if styles[1] != "constant" and not is_decayed:
        yield (
            f"{scheduler}.weight_decay_incr_style: {styles[1]} has no effect without start_weight_decay and "
            "end_weight_decay. Give them, or set this to constant."
        )
    if get(f"{scheduler}.lr_decay_iters") is not None and styles == ["constant", "constant"]:
        yield (
            f"{scheduler}.lr_decay_iters: has no effect while lr_decay_style and weight_decay_incr_style are constant. "
            "Set one of them to linear or cosine, or this to null."
        )


@cache
def defaults() -> dict[str, Any]:
    """The values of `base.yaml` as they are written, and plugins' defaults, by their paths."""
    return dict(_leaves(read_yaml(BASE))) | dict(_leaves(plugin_defaults()))


def _leaves(node: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        name = f"{path}.{key}".lstrip(".")
        if isinstance(value, dict) and value:
            yield from _leaves(value, name)
        else:
            yield name, value


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


EFFECT_WARNINGS: tuple[Rule, ...] = (
    _not_of_the_algorithm,
    _has_one_turn,
    _nobody_leads,
    _nothing_leaves,
    *(partial(_switched_off, *each) for each in _SWITCHES),
    *(partial(_unread, *each) for each in _UNREAD),
    _penalty_is_none,
    _metric_is_not_measured,
    _checkpoints_go_unmeasured,
    _gpus_of_other_machines,
    _validation_is_not_sampled,
    _schedule_has_no_such_phase,
)
