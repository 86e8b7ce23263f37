"""Rules about the devices of a vLLM engine: what must divide what.

An engine has tensor_parallel_size x pipeline_parallel_size devices, neighbours among those that generate. What depends
on their number is checked with the rest of a configuration where that names the number, and by the generator when the
devices are there: `cluster.gpus_per_node: auto` finds them.

`expert_parallel_size` is as NeMo-RL has it: 1 cuts every expert into tensor_parallel_size parts, and that size itself
leaves experts whole and shares them out. Further multiples join several engines, which then take requests in step.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from nemo_rl_offload.config.rules.parallel import training_and_generating
from nemo_rl_offload.config.rules.rule import Get, Rule, model_shape
from nemo_rl_offload.config.rules.vllm import CFG, devices_of_engine, is_used
from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.specs.model_shape import ModelShape
from nemo_rl_offload.specs.parallel_layout import nearest_multiple

TENSOR, PIPELINE, EXPERT = (f"{CFG}.{kind}_parallel_size" for kind in ("tensor", "pipeline", "expert"))
VOCABULARY_MULTIPLE = 64
"""vLLM pads the vocabulary to it before ranks share the rows."""


def num_engines(vllm_cfg: Mapping[str, Any], num_devices: int, per_node: int) -> int:
    """How many engines the devices make that generate.

    Args:
        vllm_cfg: `policy.generation.vllm_cfg`.
        num_devices: that generate.
        per_node: of these on each node.

    Raises:
        ConfigError: some would be left, or an engine would have parts of several nodes.
    """
    size = devices_of_engine(vllm_cfg)
    engine = f"{TENSOR}: an engine has tensor_parallel_size x pipeline_parallel_size = {size} devices"
    if num_devices % size:
        raise ConfigError(
            f"{engine}, which do not divide the {num_devices} that generate. Change these sizes, or let "
            f"{nearest_multiple(num_devices, size)} generate."
        )
    if per_node % size and size % per_node:
        raise ConfigError(
            f"{engine}, and {per_node} generate on a node: an engine would have parts of several nodes. Take sizes "
            f"whose product divides {per_node}, or is a multiple of it."
        )
    return num_devices // size


def _device_counts(get: Get) -> Iterator[str]:
    num_nodes, per_node = get("cluster.num_nodes"), get("cluster.gpus_per_node")
    if not is_used(get) or per_node == "auto":
        return
    colocated = get("policy.generation.colocated")
    num_training, num_generating = training_and_generating(colocated, num_nodes, per_node)
    if num_training < 1 or not (colocated["enabled"] or num_generating):  # another rule says so
        return
    num_devices = num_training if colocated["enabled"] else num_generating
    try:
        num_engines(get(CFG), num_devices, num_devices if num_nodes == 1 else per_node)
    except ConfigError as error:
        yield str(error)


def _shares_are_whole(get: Get) -> Iterator[str]:
    num_parts, num_stages = get(TENSOR), get(PIPELINE)
    if not is_used(get) or num_parts == num_stages == 1:
        return
    shape = model_shape(get)
    if num_parts > 1:
        for size, name in _shared_sizes(shape, has_whole_experts=get(EXPERT) > 1):
            if size % num_parts:
                yield f"{TENSOR}: {num_parts} does not divide the model's {size} {name}. Set a divisor of it, or 1."
                break
        else:
            if shape.num_key_value_heads % num_parts and num_parts % shape.num_key_value_heads:
                yield (
                    f"{TENSOR}: {num_parts} and the model's {shape.num_key_value_heads} key heads do not divide. "
                    "Change it."
                )
    if shape.num_layers % num_stages:
        yield (
            f"{PIPELINE}: {num_stages} does not divide the model's {shape.num_layers} layers, of which each device of "
            "an engine has as many. Set a divisor of it, or 1."
        )


def _shared_sizes(shape: ModelShape, *, has_whole_experts: bool) -> Iterator[tuple[int, str]]:
    """What an engine's devices share among them, and what it is called."""
    yield shape.num_attention_heads, "attention heads"
    if not all(shape.layers_with_experts):
        yield shape.ffn_hidden_size, "rows of an MLP"
    if shape.experts is not None:
        yield shape.experts.shared_ffn_hidden_size, "rows of the shared experts"
        if not has_whole_experts:
            yield shape.experts.ffn_hidden_size, "rows of an expert"
    yield -(-shape.vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE, "rows of the padded vocabulary"


def _experts(get: Get) -> Iterator[str]:
    num_parts, size = get(TENSOR), get(EXPERT)
    if not is_used(get) or size == 1:
        return
    if not model_shape(get).has_experts:
        yield f"{EXPERT}: the model has no experts. Set it to 1."
    elif size % num_parts:
        yield f"{EXPERT}: {size} is no multiple of tensor_parallel_size={num_parts}. Set it to {num_parts}, or 1."
    elif size != num_parts:
        yield (
            f"{EXPERT}: {size} with tensor_parallel_size={num_parts} asks for experts over several engines, not "
            f"supported here: engines take requests each on its own. Set it to {num_parts}, or both to {size}."
        )


VLLM_DEVICE_RULES: tuple[Rule, ...] = (_device_counts, _shares_are_whole, _experts)
