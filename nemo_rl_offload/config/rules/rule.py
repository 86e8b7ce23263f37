"""What a rule is, and what several rules read.

A rule is a generator of one line per problem. A line begins with the path to change and ends with the fix. A rule
reads values by their path through `get`, which ends the rule where a value is reported already.
"""

from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from typing import Any

from nemo_rl_offload.config.algorithms import ALGORITHMS, AlgorithmSpec
from nemo_rl_offload.config.full_schema import section_at
from nemo_rl_offload.config.loader import resolve_model_path
from nemo_rl_offload.config.types import keys_of
from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.specs.activation_memory import listed_modules
from nemo_rl_offload.specs.catalogue import find_config, key_in_file, read_config_file
from nemo_rl_offload.specs.model_keys import overrides_of_run, with_overrides
from nemo_rl_offload.specs.model_shape import ModelShape, parse_model_shape
from nemo_rl_offload.specs.recompute import RECOMPUTE_KEYS, RecomputeKeys, ResolvedRecompute

Get = Callable[[str], Any]
Rule = Callable[[Get], Iterator[str]]
MEGATRON = "policy.megatron_cfg"


class ReportedError(Exception):
    """A rule read a value that is reported already."""


def algorithm_spec(get: Get) -> AlgorithmSpec:
    """What is run."""
    return ALGORITHMS[get("algorithm")]


def algorithm_has(key: str, get: Get) -> bool:
    """Whether the algorithm's section has such a key."""
    return key in keys_of(section_at([get("algorithm")]))


def longest_sample(get: Get) -> tuple[str, int]:
    """The keys that say how many tokens the longest sample has, and that number.

    Where one turn makes it, a prompt and a response may be fewer than are allowed.
    """
    key, total = "policy.max_total_sequence_length", int(get("policy.max_total_sequence_length"))
    turns = f"{get('algorithm')}.max_rollout_turns"
    if not algorithm_spec(get).generates or (algorithm_has("max_rollout_turns", get) and get(turns) > 1):
        return key, total
    prompt, response = "data.max_input_seq_length", "policy.generation.max_new_tokens"
    made = int(get(prompt) + get(response))
    return (f"{prompt} + {response}", made) if made < total else (key, total)


def megatron(get: Get, key: str) -> Any:
    """The value of a key of `policy.megatron_cfg`."""
    return get(f"{MEGATRON}.{key}")


def read_model_config(model_name: str) -> Mapping[str, Any]:
    """Return what the `config.json` of a local folder holds, or that of a public model by its hub name.

    Raises ConfigError when the model is neither, or its file cannot be read.
    """
    try:
        path = resolve_model_path(model_name) / "config.json"
    except ConfigError:
        if (public := find_config(model_name)) is None:
            raise
        return public
    return read_config_file(path)


def vocabulary_key(model_name: str) -> str:
    """What says in the model's `config.json` how many tokens it has. Raises ConfigError as `read_model_config` does."""
    try:
        path = resolve_model_path(model_name) / "config.json"
    except ConfigError:  # a public model, of which only its text part is known
        return "vocab_size"
    return key_in_file(path, "vocab_size")


def read_shape(model_name: str) -> ModelShape:
    """Return what can be read of a model's shape, of any family. Raises ConfigError as `read_model_config` does."""
    return parse_model_shape(read_model_config(model_name)).shape


def model_content(get: Get) -> Mapping[str, Any]:
    """What `config.json` of the policy's model holds, but for what the run says. Raises as `read_model_config`."""
    return with_overrides_of_run(get, read_model_config(get("policy.model_name")))


def with_overrides_of_run(get: Get, content: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a `config.json` holds, and `hf_config_overrides` and `mtp_num_layers` say."""
    overrides = get("policy.hf_config_overrides")
    return with_overrides(content, overrides_of_run(content, overrides, megatron(get, "mtp_num_layers")))


def model_shape(get: Get) -> ModelShape:
    """The model's shape; ends the rule where the folder is missing or broken, which another rule reports."""
    try:
        return parse_model_shape(model_content(get)).shape
    except ConfigError as error:
        raise ReportedError from error


def num_further_tokens(get: Get) -> int:
    """How many the model predicts in training: one by each layer for it, or all by one that is repeated."""
    there, wanted = model_shape(get).num_mtp_layers, megatron(get, "mtp_num_layers")
    return int(wanted) if there and wanted and megatron(get, "mtp_use_repeated_layer") else there


def offloaded(get: Get) -> list[str]:
    """The modules that are offloaded; none while offloading is off or chooses for itself."""
    return list(listed_modules(megatron(get, "fine_grained_activation_offloading"), megatron(get, "offload_modules")))


def is_native(get: Get) -> bool:
    """Whether this project's engine moves the activations."""
    return bool(megatron(get, "activation_offload.engine") == "native")


def flex_backend(get: Get) -> str:
    """The library behind the flex dispatcher."""
    return str(megatron(get, "moe_flex_dispatcher_backend") or "deepep")


def recompute(get: Get) -> RecomputeKeys:
    """The keys of recomputation with the values that are in force."""
    return _resolved_recompute(get).keys


def recomputed(get: Get) -> list[str]:
    """The modules that selective recomputation covers."""
    return list(_resolved_recompute(get).modules)


def _resolved_recompute(get: Get) -> ResolvedRecompute:
    return ResolvedRecompute.resolve({key: megatron(get, key) for key in ("activation_checkpointing", *RECOMPUTE_KEYS)})


def have_transformer_engine() -> bool:
    """Whether Transformer Engine is installed here; not imported, which takes seconds."""
    return find_spec("transformer_engine") is not None
