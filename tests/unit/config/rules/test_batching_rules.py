"""Rules about microbatches: what breaks each, the essential words, a legal neighbor."""

from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_rl_offload.config.validation import CheckedConfig

Check = Callable[..., CheckedConfig]
MakeModel = Callable[..., Path]
Refusals = Callable[[str], list[str]]
Refuses = Callable[[str, str, str, str], None]
DYNAMIC = "policy.dynamic_batching"
PACKING = "policy.sequence_packing"
DPO = (
    "algorithm=dpo data.train.path=pairs.jsonl data.validation.path=pairs.jsonl checkpointing.metric_name=val:accuracy"
)

CASES = [
    (
        "policy.train_micro_batch_size=60",
        "policy.train_global_batch_size",
        "128 is not a multiple of train_micro_batch_size 60. Change one of them, such as train_micro_batch_size=4",
        "policy.train_micro_batch_size=32",
    ),
    (
        "policy.train_micro_batch_size=60",
        "policy.train_global_batch_size",
        "128 is not a multiple of train_micro_batch_size 60",
        f"{DYNAMIC}.enabled=true",
    ),
    (
        f"{DYNAMIC}.enabled=true {PACKING}.enabled=true",
        f"{PACKING}.enabled",
        "excluded by dynamic_batching.enabled",
        f"{DYNAMIC}.enabled=false",
    ),
    (
        f"{DYNAMIC}.enabled=true {DYNAMIC}.train_mb_tokens=127",
        f"{DYNAMIC}.train_mb_tokens",
        "127 is less than the longest sample takes, data.max_input_seq_length + policy.generation.max_new_tokens = 88, "
        "rounded up. Set at least 128.",
        f"{DYNAMIC}.train_mb_tokens=128",
    ),
    (
        f"{PACKING}.enabled=true {PACKING}.logprob_mb_tokens=87 {PACKING}.sequence_length_round=1",
        f"{PACKING}.logprob_mb_tokens",
        "Set at least 88.",
        f"{PACKING}.logprob_mb_tokens=88",
    ),
    (
        f"{PACKING}.enabled=true {PACKING}.logprob_mb_tokens=95 {PACKING}.sequence_length_round=1 "
        "policy.generation.max_new_tokens=90",
        f"{PACKING}.logprob_mb_tokens",
        "policy.max_total_sequence_length = 96, rounded up. Set at least 96.",
        f"{PACKING}.logprob_mb_tokens=96",
    ),
    (  # of several turns
        f"{PACKING}.enabled=true {PACKING}.train_mb_tokens=95 {PACKING}.sequence_length_round=1 "
        "grpo.max_rollout_turns=2",
        f"{PACKING}.train_mb_tokens",
        "Set at least 96.",
        "grpo.max_rollout_turns=1",
    ),
    (
        f"{PACKING}.enabled=true {PACKING}.train_mb_tokens=96 {PACKING}.sequence_length_round=power_of_two",
        f"{PACKING}.train_mb_tokens",
        "Set at least 128.",
        f"{PACKING}.train_mb_tokens=128",
    ),
    (
        f"{DPO} {PACKING}.enabled=true {PACKING}.train_mb_tokens=191 {PACKING}.sequence_length_round=64",
        f"{PACKING}.train_mb_tokens",
        "max_total_sequence_length = 96 twice, rounded up. Set at least 192.",
        f"{PACKING}.train_mb_tokens=192",
    ),
    (
        f"{DPO} {DYNAMIC}.enabled=true {DYNAMIC}.train_mb_tokens=255 {DYNAMIC}.sequence_length_round=64",
        f"{DYNAMIC}.train_mb_tokens",
        "Set at least 256.",
        f"{DYNAMIC}.train_mb_tokens=256",
    ),
    (
        f"{DYNAMIC}.enabled=true {DYNAMIC}.train_mb_tokens=97 {DYNAMIC}.sequence_length_round=97 "
        "M.tensor_model_parallel_size=2 M.sequence_parallel=true",
        f"{DYNAMIC}.train_mb_tokens",
        "Set at least 98.",
        f"{DYNAMIC}.train_mb_tokens=98",
    ),
    (
        f"{DYNAMIC}.enabled=true {DYNAMIC}.train_mb_tokens=97 {DYNAMIC}.sequence_length_round=97 "
        "M.context_parallel_size=2",
        f"{DYNAMIC}.train_mb_tokens",
        "Set at least 100.",
        f"{DYNAMIC}.train_mb_tokens=100",
    ),
    (  # 97 tokens are 104 for each of the two rows, where ranks share them
        f"{DPO} {PACKING}.enabled=true {PACKING}.train_mb_tokens=207 {PACKING}.sequence_length_round=1 "
        "policy.max_total_sequence_length=97 M.context_parallel_size=4 cluster.gpus_per_node=4",
        f"{PACKING}.train_mb_tokens",
        "Set at least 208.",
        f"{PACKING}.train_mb_tokens=208",
    ),
]


@pytest.mark.parametrize(("broken", "path", "words", "legal"), CASES)
def test_rules(refuses: Refuses, broken: str, path: str, words: str, legal: str) -> None:
    refuses(broken, path, words, legal)


def test_budgets_of_what_is_off_do_not_matter(refusals: Refusals) -> None:
    assert refusals(f"{DYNAMIC}.train_mb_tokens=1 {PACKING}.logprob_mb_tokens=1") == []


def test_by_default_a_budget_is_the_fixed_microbatch_at_its_longest(check: Check) -> None:
    policy = check(f"{PACKING}.enabled=true", "policy.train_micro_batch_size=8").config["policy"]
    assert policy["sequence_packing"]["train_mb_tokens"] == 8 * 96
    assert policy["sequence_packing"]["logprob_mb_tokens"] == 128 * 96


@pytest.mark.parametrize(("overrides", "num_warnings"), [((), 1), ((f"{PACKING}.enabled=true",), 0)])
def test_chunks_longer_than_any_sequence_are_warned_about(
    check: Check, overrides: tuple[str, ...], num_warnings: int
) -> None:
    warnings = check("policy.logprob_chunk_size=96", *overrides).warnings
    assert [line.startswith("policy.logprob_chunk_size: 96 has no effect") for line in warnings] == [
        True
    ] * num_warnings
    assert check("policy.logprob_chunk_size=95").warnings == []


def test_a_sequence_beyond_the_models_positions(check: Check, make_model: MakeModel) -> None:
    model = f"policy.model_name={make_model(max_position_embeddings=256)}"
    (warning,) = check(model, "policy.max_total_sequence_length=257").warnings
    assert warning.startswith("policy.max_total_sequence_length: 257 is more than the 256 positions that the model is")
    assert check(model, "policy.max_total_sequence_length=256").warnings == []
    assert check("policy.max_total_sequence_length=257").warnings == [], "it does not say"


def test_chunks_of_the_output_head_without_effect_are_said(check: Check) -> None:
    cfg = "policy.megatron_cfg"
    tokens = f"{cfg}.fused_linear_logprobs_chunk_size"
    assert check(f"{tokens}=64").warnings == []
    assert check(f"{tokens}=64", f"{cfg}.use_fused_linear_logprobs=false").warnings == [
        f"{tokens}: 64 has no effect without use_fused_linear_logprobs."
    ]
    assert check(f"{tokens}=64", "policy.logprob_chunk_size=32").warnings == [
        f"policy.logprob_chunk_size: 32 has no effect beside {tokens}."
    ]
