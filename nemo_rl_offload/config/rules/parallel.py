"""Rules about parallelism: what must divide what, which messages between pipeline ranks are safe, how many workers.

What the number of workers must be divided by is checked with the rest of a configuration where that names the number,
and by the policy when the workers are there: `cluster.gpus_per_node: auto` finds them.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from nemo_rl_offload.config.rules.batching import is_by_tokens
from nemo_rl_offload.config.rules.rule import (
    MEGATRON,
    Get,
    Rule,
    algorithm_spec,
    megatron,
    model_shape,
    num_further_tokens,
    read_shape,
)
from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.specs.model_shape import ModelShape
from nemo_rl_offload.specs.parallel_layout import (
    NO_EXPERTS,
    division_remedy,
    expert_tensor_problem,
    grouped_rows_problem,
    nearest_divisor,
    nearest_multiple,
    num_microbatches,
    recurrent_groups_problem,
    recurrent_heads_problem,
)
from nemo_rl_offload.specs.pipeline_layout import KEY as STAGES
from nemo_rl_offload.specs.pipeline_layout import VIRTUAL, layout_problems

SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "virtual_pipeline_model_parallel_size",
)
ETP = "expert_tensor_parallel_size"


def _tensor(get: Get) -> Iterator[str]:
    path, num_ranks = f"{MEGATRON}.tensor_model_parallel_size", megatron(get, "tensor_model_parallel_size")
    if num_ranks == 1:
        if megatron(get, "sequence_parallel"):
            yield f"{MEGATRON}.sequence_parallel: needs tensor_model_parallel_size above 1. Set it to false."
        return
    shape = model_shape(get)
    if shape.num_attention_heads % num_ranks:
        number = shape.num_attention_heads
        nearest = nearest_divisor(number, num_ranks)
        yield f"{path}: {num_ranks} does not divide the model's {number} attention heads. {nearest}"
    elif shape.num_key_value_heads % num_ranks and num_ranks % shape.num_key_value_heads:
        yield f"{path}: {num_ranks} and the model's {shape.num_key_value_heads} key heads do not divide. Change it."
    if problem := recurrent_groups_problem(shape, num_ranks):
        yield f"{path}: {problem}"


def _context(get: Get) -> Iterator[str]:
    tensor, context = megatron(get, "tensor_model_parallel_size"), megatron(get, "context_parallel_size")
    if problem := recurrent_heads_problem(model_shape(get), tensor, context):
        yield f"{MEGATRON}.context_parallel_size: {problem}"


def _experts(get: Get) -> Iterator[str]:
    for key in ("expert_model_parallel_size", ETP):
        if megatron(get, key) > 1 and not model_shape(get).has_experts:
            yield f"{MEGATRON}.{key}: {NO_EXPERTS}"
    problem = expert_tensor_problem(model_shape(get), megatron(get, ETP)) or _rows_problem(get, model_shape(get))
    if problem is not None:
        yield f"{MEGATRON}.{ETP}: {problem}"
    splits_tensors_alone = megatron(get, "tensor_model_parallel_size") > 1 and not megatron(get, "sequence_parallel")
    if splits_tensors_alone and model_shape(get).has_experts:
        yield f"{MEGATRON}.sequence_parallel: experts need it beside tensor parallelism. Set it to true."


def _rows_problem(get: Get, shape: ModelShape) -> str | None:
    """Of experts' parts in layers of torch."""
    if megatron(get, "transformer_impl") != "torch" or shape.experts is None:
        return None
    element_bytes = 4 if get("policy.precision") == "float32" else 2
    return grouped_rows_problem(shape.experts.ffn_hidden_size, megatron(get, ETP), element_bytes)


def _messages(get: Get) -> Iterator[str]:
    batched = f"{MEGATRON}.batch_p2p_comm"
    if megatron(get, "overlap_p2p_comm") and get(batched):
        yield f"{batched}: excluded by overlap_p2p_comm. Set one of the two to false."
    elif megatron(get, VIRTUAL) is not None and megatron(get, "pipeline_model_parallel_size") == 2 and get(batched):
        yield (
            f"{batched}: with {VIRTUAL} and two pipeline ranks, batched messages give wrong gradients. "
            "Set it to false and overlap_p2p_comm to true."
        )


def _pipeline_layers(get: Get) -> Iterator[str]:
    """Each rank's layers, and each of its virtual stages, must be whole; the first and the last may differ."""
    num_ranks, num_parts = megatron(get, "pipeline_model_parallel_size"), megatron(get, VIRTUAL)
    ends = {f"num_layers_in_{end}_pipeline_stage": end for end in ("first", "last")}
    if num_ranks == 1:
        for key in (VIRTUAL, *ends, STAGES):
            if megatron(get, key) is not None:
                yield f"{MEGATRON}.{key}: needs pipeline_model_parallel_size above 1. Raise that, or set this to null."
        return
    if (text := megatron(get, STAGES)) is not None:
        yield from _stages(get, text, [key for key in ends if megatron(get, key) is not None])
        return
    given = {key: num for key in ends if (num := megatron(get, key)) is not None}
    shape = model_shape(get)
    total = len(shape.layers_with_experts)
    remedy = division_remedy(total, num_ranks, num_parts or 1, num_further_tokens(get), list(given))
    if uneven := {key: num for key, num in given.items() if num % (num_parts or 1)}:
        for key, num in uneven.items():
            yield f"{MEGATRON}.{key}: {num} is not a multiple of {VIRTUAL} {num_parts}. {remedy}"
        return
    num_layers, others = total - sum(given.values()), num_ranks - len(given)
    stages = others * (num_parts or 1)
    if num_layers < others or (num_layers and not others) or (stages and num_layers % stages):
        parts = [f"{num_parts} virtual stages each"] if num_parts else []
        parts += [f"{key}={num}" for key, num in given.items()]
        yield (
            f"{MEGATRON}.pipeline_model_parallel_size: {total} layers cannot be divided among {num_ranks} ranks"
            f"{f' with {" and ".join(parts)}' if parts else ''}. {remedy}"
        )


def _stages(get: Get, text: str, others: list[str]) -> Iterator[str]:
    path, shape = f"{MEGATRON}.{STAGES}", model_shape(get)
    for key in others:
        yield f"{MEGATRON}.{key}: excluded by {STAGES}, which says it. Set it to null."
    problems = layout_problems(
        text,
        num_layers=len(shape.layers_with_experts),
        num_mtp_layers=num_further_tokens(get),
        pipeline=megatron(get, "pipeline_model_parallel_size"),
        virtual=megatron(get, VIRTUAL),
    )
    yield from (f"{path}: {problem}" for problem in problems)


def _teacher(get: Get) -> Iterator[str]:
    """The teacher has the student's ranks; its layers are divided evenly among those of a pipeline."""
    path = "teacher.model_name"
    if not algorithm_spec(get).needs_teacher or (name := get(path)) is None:
        return
    try:
        shape = read_shape(name)
    except ConfigError:  # which another rule reports
        return
    ranks, tensor, experts = (megatron(get, f"{each}_model_parallel_size") for each in ("pipeline", "tensor", "expert"))
    num_experts = shape.experts.num_experts if shape.experts else 0
    heads, key_heads = shape.num_attention_heads, shape.num_key_value_heads
    change = "Change it, or take another teacher"
    if shape.num_layers % ranks:
        size = f"{MEGATRON}.pipeline_model_parallel_size {ranks}"
        yield f"{path}: {size}, the student's, does not divide the teacher's {shape.num_layers} layers. {change}."
    if heads % tensor or (key_heads % tensor and tensor % key_heads):
        size = f"{MEGATRON}.tensor_model_parallel_size {tensor}"
        yield f"{path}: {size}, the student's, does not divide the teacher's {heads} and {key_heads} heads. {change}."
    if shape.num_mamba_groups % tensor:
        size = f"{MEGATRON}.tensor_model_parallel_size {tensor}"
        yield f"{path}: {size}, the student's, does not divide the teacher's {shape.num_mamba_groups} groups. {change}."
    if shape.num_delta_heads % tensor or (shape.num_delta_heads and key_heads % tensor):
        size = f"{MEGATRON}.tensor_model_parallel_size {tensor}"
        held = f"{shape.num_delta_heads} and {key_heads} heads of keys"
        yield f"{path}: {size}, the student's, does not divide the teacher's {held}. {change}."
    if problem := recurrent_heads_problem(shape, tensor, megatron(get, "context_parallel_size")):
        yield f"{path}: context_parallel_size, the student's, is the teacher's too: {problem} Or take another teacher."
    if experts > 1 and (not num_experts or num_experts % experts):
        size = f"{MEGATRON}.expert_model_parallel_size {experts}"
        yield f"{path}: {size}, the student's, does not divide the teacher's {num_experts} experts. {change}."
    problem = expert_tensor_problem(shape, megatron(get, ETP)) or _rows_problem(get, shape)
    if problem is not None:
        yield f"{path}: {ETP}, the student's, is the teacher's too: {problem} Or take another teacher."
    if num_experts and tensor > 1 and not megatron(get, "sequence_parallel"):
        yield f"{path}: the teacher's experts need sequence_parallel beside tensor parallelism. Set it to true."


def data_parallel_size(cfg: Mapping[str, Any], world_size: int) -> int:
    """How many shards a batch is cut into. `cfg` is `policy.megatron_cfg`, or its `SIZES`.

    Raises ConfigError when the ranks do not divide among the parallel sizes.
    """
    num_alike = cfg["tensor_model_parallel_size"] * cfg["context_parallel_size"]
    num_together = num_alike * cfg["pipeline_model_parallel_size"]
    if world_size % num_together:
        names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
        product = " x ".join(str(cfg[name]) for name in names)
        above_one = " or ".join(name for name in names if cfg[name] > 1)
        nearest = nearest_multiple(world_size, num_together)
        raise ConfigError(
            f"cluster.gpus_per_node: {' x '.join(names)} = {product} = {num_together} does not divide {world_size} "
            f"worker(s). Lower {above_one}, or {'raise' if nearest > world_size else 'lower'} cluster.gpus_per_node: "
            f"{nearest} worker(s) can be divided so."
        )
    num_shards: int = world_size // num_together
    num_ranks, num_parts = num_shards * num_alike, cfg[ETP]
    num_expert_ranks = cfg["expert_model_parallel_size"] * num_parts
    if num_ranks % num_expert_ranks:
        product = f" x {ETP} {num_parts} = {num_expert_ranks}" if num_parts > 1 else ""
        raise ConfigError(
            f"{MEGATRON}.expert_model_parallel_size: {cfg['expert_model_parallel_size']}{product} does not divide the "
            f"{num_ranks} worker(s) of a pipeline stage. Change it, or the number of workers."
        )
    return num_shards


def check_ranks_have_samples(whole: int, num_shards: int) -> None:
    """Raise ConfigError where a batch of so many samples leaves data-parallel ranks without any."""
    if whole < num_shards:
        raise ConfigError(
            f"policy.train_global_batch_size: {whole} for {num_shards} data-parallel ranks, of which "
            f"{num_shards - whole} would have nothing to do. Set at least {num_shards}, or take fewer GPUs."
        )


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
    if (per_node := get("cluster.gpus_per_node")) != "auto":
        yield from worker_counts(get, per_node)


def worker_counts(get: Get, per_node: int) -> Iterator[str]:
    """A rule for so many workers on each node: they divide among the parallel sizes, and the batch among them."""
    num_nodes = get("cluster.num_nodes")
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
        if num_generating and get("policy.generation.backend") == "megatron":
            data_parallel_size(cfg, num_generating)
        is_told = get("cluster.gpus_per_node") == "auto" and whole % micro
        if is_by_tokens(get):
            check_ranks_have_samples(whole, num_shards)
        elif not is_told:
            num_microbatches(whole, micro, num_shards, num_interleaved(cfg))
    except ConfigError as error:
        yield str(error)


PARALLEL_RULES: tuple[Rule, ...] = (
    _tensor,
    _context,
    _experts,
    _messages,
    _pipeline_layers,
    _teacher,
    _worker_counts,
)
