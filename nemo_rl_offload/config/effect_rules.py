"""Warnings about settings that nothing reads: with this algorithm, or while another key has the value that it has.

A value equal to the default was not set, so nothing is said about it.
"""

import json
from collections.abc import Iterator, Mapping
from functools import cache, partial
from typing import Any

import yaml

from nemo_rl_offload.config.algorithm_rules import METRICS, SPLITS, validates
from nemo_rl_offload.config.loader import BASE
from nemo_rl_offload.config.rule import MEGATRON, Get, Rule
from nemo_rl_offload.config.run_rules import GENERATES, takes_problems

_OF_DISTILLATION = [f"loss_fn.{key}" for key in ("kl_type", "mixed_kl_weight", "zero_outside_topk")]
_READERS: dict[str, tuple[str, ...]] = {
    **{algorithm: (algorithm,) for algorithm in METRICS},
    "teacher": ("distillation",),
    "loss_fn": ("grpo",),
    **dict.fromkeys(_OF_DISTILLATION, ("distillation",)),
    "policy.generation": GENERATES,
    "policy.generation_batch_size": GENERATES,
    "policy.logprob_batch_size": ("grpo", "dpo", "distillation"),
    "data.env_name": GENERATES,
    "data.max_input_seq_length": GENERATES,
}
"""The algorithms that read a key, or a section where the key itself is not listed; all where neither is."""

_COLOCATED, _SHAPING = "policy.generation.colocated", "grpo.reward_shaping"
_SWITCHES: dict[str, tuple[str, tuple[Any, ...]]] = {
    f"{MEGATRON}.optimizer.min_lr": (f"{MEGATRON}.scheduler.lr_decay_style", ("linear", "cosine")),
    f"{_COLOCATED}.resources.gpus_per_node": (f"{_COLOCATED}.enabled", (False,)),
    f"{_COLOCATED}.resources.num_nodes": (f"{_COLOCATED}.enabled", (False,)),
    "loss_fn.truncated_importance_sampling_ratio": ("loss_fn.use_importance_sampling_correction", (True,)),
    "loss_fn.mixed_kl_weight": ("loss_fn.kl_type", ("mixed",)),
    "grpo.max_rollout_turns": ("data.env_name", ("function",)),
    "distillation.max_rollout_turns": ("data.env_name", ("function",)),
    "grpo.dynamic_sampling_max_gen_batches": ("grpo.use_dynamic_sampling", (True,)),
    f"{_SHAPING}.max_response_length": (f"{_SHAPING}.enabled", (True,)),
    f"{_SHAPING}.overlong_buffer_length": (f"{_SHAPING}.enabled", (True,)),
    f"{_SHAPING}.overlong_buffer_penalty": (f"{_SHAPING}.enabled", (True,)),
}
"""Keys that are read only while another one, the switch, has one of these values."""


def _not_of_the_algorithm(get: Get) -> Iterator[str]:
    for path, default in defaults().items():
        if not _is_read(path, get) and get(path) != default:
            yield f"{path}: {get(path)} has no effect with algorithm {get('algorithm')}."


def _is_read(path: str, get: Get) -> bool:
    algorithm = get("algorithm")
    section, _, key = path.partition(".")
    if path in [f"{split}.split" for split in SPLITS]:
        return not takes_problems(get)
    if section == "env" and not key.startswith("reasoning_gym."):
        return bool(algorithm in GENERATES and key.startswith(f"{get('data.env_name')}."))
    if section == "env" or path in [f"{split}.{name}" for split in SPLITS for name in ("seed", "size", "exclude")]:
        return takes_problems(get)
    while path and path not in _READERS:
        path = path.rpartition(".")[0]
    return not path or algorithm in _READERS[path]


def _switched_off(path: str, switch: str, values: tuple[Any, ...], get: Get) -> Iterator[str]:
    value, default = get(path), defaults()[path]
    if value != default and get(switch) not in values and _is_read(path, get):
        yield (
            f"{path}: {_shown(value)} has no effect while {switch} is {_shown(get(switch))}. "
            f"Set that to {' or '.join(map(_shown, values))}, or this to {_shown(default)}."
        )


def _metric_is_not_measured(get: Get) -> Iterator[str]:
    path, algorithm = "checkpointing.metric_name", get("algorithm")
    metric = get(path)
    if metric.startswith("val:") and metric != defaults()[path] and not validates(get):
        yield (
            f"{path}: {metric} has no effect while validation is off: the latest checkpoints are kept. Set "
            f"{algorithm}.val_at_end=true, or this to train:loss."
        )


def _schedule_has_no_such_phase(get: Get) -> Iterator[str]:
    scheduler = f"{MEGATRON}.scheduler"
    if get(f"{scheduler}.lr_warmup_init") and not get(f"{scheduler}.lr_warmup_iters"):
        yield f"{scheduler}.lr_warmup_init: has no effect without a warm-up. Set lr_warmup_iters, or this to 0.0."
    styles = [get(f"{scheduler}.{key}") for key in ("lr_decay_style", "weight_decay_incr_style")]
    if get(f"{scheduler}.lr_decay_iters") is not None and styles == ["constant", "constant"]:
        yield (
            f"{scheduler}.lr_decay_iters: has no effect while lr_decay_style and weight_decay_incr_style are constant. "
            "Set one of them to linear or cosine, or this to null."
        )


@cache
def defaults() -> dict[str, Any]:
    """The values of `base.yaml` as they are written, by their paths."""
    return dict(_leaves(yaml.safe_load(BASE.read_text(encoding="utf-8"))))


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
    *(partial(_switched_off, path, switch, values) for path, (switch, values) in _SWITCHES.items()),
    _metric_is_not_measured,
    _schedule_has_no_such_phase,
)
