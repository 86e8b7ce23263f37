"""Rules about parallelism: what must divide what, and which messages between pipeline ranks are safe."""

from collections.abc import Iterator

from nemo_rl_offload.config.rules.rule import MEGATRON, Get, Rule, megatron, model_shape

VIRTUAL = "virtual_pipeline_model_parallel_size"


def _tensor(get: Get) -> Iterator[str]:
    path, num_ranks = f"{MEGATRON}.tensor_model_parallel_size", megatron(get, "tensor_model_parallel_size")
    if num_ranks == 1:
        if megatron(get, "sequence_parallel"):
            yield f"{MEGATRON}.sequence_parallel: needs tensor_model_parallel_size above 1. Set it to false."
        return
    shape = model_shape(get)
    if shape.num_attention_heads % num_ranks:
        yield f"{path}: {num_ranks} does not divide the model's {shape.num_attention_heads} attention heads. Change it."
    elif shape.num_key_value_heads % num_ranks and num_ranks % shape.num_key_value_heads:
        yield f"{path}: {num_ranks} and the model's {shape.num_key_value_heads} key heads do not divide. Change it."
    if shape.vocab_size % num_ranks:
        yield f"{path}: {num_ranks} does not divide the model's vocabulary of {shape.vocab_size} tokens. Change it."


def _experts(get: Get) -> Iterator[str]:
    if megatron(get, "expert_model_parallel_size") > 1 and not model_shape(get).has_experts:
        yield f"{MEGATRON}.expert_model_parallel_size: the model has no experts. Set it to 1."
    splits_tensors_alone = megatron(get, "tensor_model_parallel_size") > 1 and not megatron(get, "sequence_parallel")
    if splits_tensors_alone and model_shape(get).has_experts:
        yield f"{MEGATRON}.sequence_parallel: experts need it beside tensor parallelism. Set it to true."


def _context(get: Get) -> Iterator[str]:
    path, num_ranks = f"{MEGATRON}.context_parallel_size", megatron(get, "context_parallel_size")
    if num_ranks == 1:
        return
    if get("policy.sequence_packing.enabled"):
        yield f"{path}: packs of sequences are not split over ranks. Set it to 1, or use policy.dynamic_batching."
    if model_shape(get).predicts_further_tokens:
        yield f"{path}: Megatron averages the loss of further tokens over a rank's own part alone. Set it to 1."


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
        for key in (VIRTUAL, *ends):
            if megatron(get, key) is not None:
                yield f"{MEGATRON}.{key}: needs pipeline_model_parallel_size above 1. Raise that, or set this to null."
        return
    given = {key: num for key in ends if (num := megatron(get, key)) is not None}
    if uneven := {key: num for key, num in given.items() if num % (num_parts or 1)}:
        for key, num in uneven.items():
            yield f"{MEGATRON}.{key}: {num} is not a multiple of {VIRTUAL} {num_parts}. Change one of them."
        return
    num_layers, others = len(model_shape(get).layers_with_experts) - sum(given.values()), num_ranks - len(given)
    stages = others * (num_parts or 1)
    if num_layers < others or (num_layers and not others) or (stages and num_layers % stages):
        yield (
            f"{MEGATRON}.pipeline_model_parallel_size: {num_layers} layers cannot be divided among {others} ranks"
            f"{f' and {num_parts} virtual stages' if num_parts else ''}. Change the sizes of the pipeline."
        )


PARALLEL_RULES: tuple[Rule, ...] = (_tensor, _experts, _context, _messages, _pipeline_layers)
