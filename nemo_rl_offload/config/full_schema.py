"""The schema with what plugins add: their sections, and their names among the allowed values.

`MasterConfig` is what the code is checked against by types, and has the package's own sections. Without plugins it is
the whole schema.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Literal, TypedDict, get_args

from nemo_rl_offload.config.algorithms import ALGORITHMS
from nemo_rl_offload.config.environments import ENVIRONMENTS
from nemo_rl_offload.config.schema import MasterConfig
from nemo_rl_offload.config.types import closed, defaults_of, item_type, keys_of
from nemo_rl_offload.errors import ConfigError, nearest


@cache
def full_schema() -> Any:
    """`MasterConfig`, or a type with its keys and those of plugins. Raises ConfigError for a plugin that is broken."""
    if not (ALGORITHMS.plugins or ENVIRONMENTS.plugins):
        return MasterConfig
    if taken := next((name for name in ALGORITHMS.plugins if name in keys_of(MasterConfig)), None):
        raise ConfigError(f"plugin: the name {taken} is that of another section. Give another name.")
    metrics = get_args(keys_of(keys_of(MasterConfig)["checkpointing"])["metric_name"])
    of_plugins = [metric for spec in ALGORITHMS.plugins.values() for metric in spec.metrics]
    return _with_keys(
        MasterConfig,
        {
            "algorithm": Literal[tuple(ALGORITHMS)],
            **{name: spec.section for name, spec in ALGORITHMS.plugins.items()},
            "data": {"env_name": Literal[tuple(ENVIRONMENTS)]},
            "env": {name: spec.section for name, spec in ENVIRONMENTS.plugins.items()},
            "checkpointing": {"metric_name": Literal[tuple(dict.fromkeys([*metrics, *of_plugins]))]},
        },
    )


def plugin_defaults() -> dict[str, Any]:
    """The values of plugins' sections, which `base.yaml` cannot hold."""
    of_algorithms, of_environments = (
        {name: defaults_of(spec.section) for name, spec in registry.plugins.items()}
        for registry in (ALGORITHMS, ENVIRONMENTS)
    )
    return of_algorithms | ({"env": of_environments} if of_environments else {})


def _with_keys(section: type, changes: Mapping[str, Any]) -> Any:
    """A section like another with other types of some keys; a mapping changes the section of that name."""
    keys = keys_of(section)
    for key, change in changes.items():
        keys[key] = _with_keys(keys[key], change) if isinstance(change, Mapping) else change
    make: Any = TypedDict
    return closed(make(section.__name__, keys))


def section_at(path: Sequence[str]) -> Any:
    """Return the annotation of a section, None where the schema has none."""
    annotation: Any = full_schema()
    for part in path:
        annotation = keys_of(annotation).get(part, item_type(annotation, dict))
    return annotation


def may_be_added(key: str, section: Any) -> bool:
    """Whether the schema takes this key there: it is one of the section's, or the section takes any."""
    return key in keys_of(section) or section is Any or item_type(section, dict) is not None


OTHER_NAMES: Mapping[str, str] = {
    **dict.fromkeys(("learning_rate", "max_lr"), "policy.megatron_cfg.optimizer.lr"),
    **dict.fromkeys(("beta1", "betas"), "policy.megatron_cfg.optimizer.adam_beta1"),
    "beta2": "policy.megatron_cfg.optimizer.adam_beta2",
    **dict.fromkeys(("eps", "epsilon"), "policy.megatron_cfg.optimizer.adam_eps"),
    **dict.fromkeys(("warmup_steps", "num_warmup_steps"), "policy.megatron_cfg.scheduler.lr_warmup_iters"),
    **dict.fromkeys(("max_grad_norm", "gradient_clipping"), "policy.megatron_cfg.optimizer.clip_grad"),
    **dict.fromkeys(("batch_size", "global_batch_size"), "policy.train_global_batch_size"),
    **dict.fromkeys(("micro_batch_size", "per_device_train_batch_size"), "policy.train_micro_batch_size"),
    **dict.fromkeys(
        ("max_length", "max_seq_length", "seq_length", "sequence_length"), "policy.max_total_sequence_length"
    ),
    **dict.fromkeys(("max_completion_length", "max_tokens"), "policy.generation.max_new_tokens"),
    **dict.fromkeys(("model", "model_path", "model_name_or_path"), "policy.model_name"),
    **dict.fromkeys(("dtype", "torch_dtype", "bf16"), "policy.precision"),
    **dict.fromkeys(("gradient_checkpointing",), "policy.megatron_cfg.activation_checkpointing"),
    **dict.fromkeys(("tensor_parallel_size", "tp"), "policy.megatron_cfg.tensor_model_parallel_size"),
    **dict.fromkeys(("pipeline_parallel_size", "pp"), "policy.megatron_cfg.pipeline_model_parallel_size"),
    **dict.fromkeys(("kl_coef", "beta"), "loss_fn.reference_policy_kl_penalty"),
    **dict.fromkeys(("output_dir", "save_dir"), "checkpointing.checkpoint_dir"),
    "save_steps": "checkpointing.save_period",
    **dict.fromkeys(("rank", "r", "lora_rank", "lora_r"), "policy.megatron_cfg.peft.dim"),
    "lora_alpha": "policy.megatron_cfg.peft.alpha",
    "lora_dropout": "policy.megatron_cfg.peft.dropout",
    **dict.fromkeys(("num_gpus", "gpus"), "cluster.gpus_per_node"),
}
"""Names that other programs give to keys."""


def right_place(key: str, section: Any, algorithm: object = None) -> str:
    """Return the nearest key of the section, else the place that has this very key, or has it by another name.

    Of several sections that is the one of `algorithm`, where it has the key.
    """
    known = [path for path, keys in _sections(full_schema(), "") if path and key in keys]
    if key not in OTHER_NAMES:
        place = algorithm if algorithm in known else next(iter(known), None)
        return nearest(key, keys_of(section)) or (f" It belongs to {place}." if place else "")
    return f" Here it is {OTHER_NAMES[key]}."


def _sections(annotation: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    keys = keys_of(annotation)
    yield path, keys
    for key, child in keys.items():
        yield from _sections(child, f"{path}.{key}".lstrip("."))
