"""Rules about microbatches: numbers of samples that divide, or numbers of tokens into which the longest sample fits."""

from collections.abc import Iterator
from math import gcd

from nemo_rl_offload.config.rules.rule import (
    Get,
    Rule,
    algorithm_spec,
    longest_sample,
    megatron,
    model_content,
    model_shape,
)
from nemo_rl_offload.specs.model_keys import positions_of
from nemo_rl_offload.specs.parallel_layout import rounded_length, sequence_multiple, width_multiple

BY_TOKENS = ("dynamic_batching", "sequence_packing")


def is_by_tokens(get: Get) -> bool:
    """Whether microbatches are numbers of tokens."""
    return any(get(f"policy.{section}.enabled") for section in BY_TOKENS)


def _whole_microbatches(get: Get) -> Iterator[str]:
    """Where it is not known yet how many ranks divide them."""
    whole, micro = get("policy.train_global_batch_size"), get("policy.train_micro_batch_size")
    if get("cluster.gpus_per_node") == "auto" and whole % micro and not is_by_tokens(get):
        yield (
            f"policy.train_global_batch_size: {whole} is not a multiple of train_micro_batch_size {micro}. "
            f"Change one of them, such as train_micro_batch_size={gcd(whole, micro)}."
        )


def _one_of_two(get: Get) -> Iterator[str]:
    if all(get(f"policy.{section}.enabled") for section in BY_TOKENS):
        yield (
            "policy.sequence_packing.enabled: excluded by dynamic_batching.enabled: a microbatch is padded or packed. "
            "Set one of the two to false."
        )


def _longest_sample(get: Get) -> Iterator[str]:
    """Whole samples go into a microbatch: in dpo's training two rows, which packing rounds up together, and each for
    itself where context-parallel ranks share it."""
    (keys, longest), num_rows = longest_sample(get), algorithm_spec(get).rows_per_sample
    sizes = (
        megatron(get, "tensor_model_parallel_size") if megatron(get, "sequence_parallel") else 1,
        megatron(get, "context_parallel_size"),
    )
    fp8_recipe = megatron(get, "fp8_cfg.fp8_recipe") if megatron(get, "fp8_cfg.enabled") else None
    multiple, row = width_multiple(*sizes, fp8_recipe), rounded_length(longest, sequence_multiple(*sizes))
    for section in (f"policy.{name}" for name in BY_TOKENS):
        if not get(f"{section}.enabled"):
            continue
        rounding = get(f"{section}.sequence_length_round")

        def width(length: int, rounding: int = rounding) -> int:
            return rounded_length(rounded_length(length, rounding), multiple)

        pair = width(num_rows * row) if section.endswith("packing") else num_rows * width(longest)
        for key, needed in (("train_mb_tokens", pair), ("logprob_mb_tokens", width(longest))):
            if (given := get(f"{section}.{key}")) < needed:
                yield (
                    f"{section}.{key}: {given} is less than the longest sample takes, {keys} = "
                    f"{longest}{' twice' * (needed == pair and num_rows == 2)}, rounded up. Set at least {needed}."
                )


BATCHING_RULES: tuple[Rule, ...] = (_whole_microbatches, _one_of_two, _longest_sample)


def _without_effect(get: Get) -> Iterator[str]:
    chunk = get("policy.logprob_chunk_size")
    key = "policy.megatron_cfg.fused_linear_logprobs_chunk_size"
    if (tokens := get(key)) is not None:
        if not get("policy.megatron_cfg.use_fused_linear_logprobs"):
            yield f"{key}: {tokens} has no effect without use_fused_linear_logprobs."
        elif chunk is not None:
            yield f"policy.logprob_chunk_size: {chunk} has no effect beside {key}."
            return
    longest = get("policy.max_total_sequence_length")
    if chunk is not None and chunk >= longest and not get("policy.sequence_packing.enabled"):
        yield (
            f"policy.logprob_chunk_size: {chunk} has no effect: no sequence is longer than max_total_sequence_length "
            f"{longest}."
        )


def _beyond_the_models_positions(get: Get) -> Iterator[str]:
    longest, made_for = get("policy.max_total_sequence_length"), model_shape(get).max_positions
    if made_for:
        made_for = max(made_for, positions_of(model_content(get)))
    if 0 < made_for < longest:
        yield (
            f"policy.max_total_sequence_length: {longest} is more than the {made_for} positions that the model is made "
            "for (max_position_embeddings). Lower it, or give a model of longer context."
        )


BATCHING_WARNINGS: tuple[Rule, ...] = (_without_effect, _beyond_the_models_positions)
