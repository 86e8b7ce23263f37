"""Every key of every family's `config.json`, and mutated ones: the loss of transformers, or a refusal by name."""

import random
from pathlib import Path

import pytest
from model_variants import HONOURED, Variant, failures, mutated, outcome, table

pytestmark = pytest.mark.usefixtures("megatron_process_group")

REFUSED = [
    Variant("qwen2", {"attention_bias": True}),
    Variant("qwen3", {"use_qk_norm": False}),
    Variant("deepseek_v3", {"num_experts_per_tok": 1}),
    Variant("gemma", {"tie_word_embeddings": False}),
    Variant("glm4_moe_lite", {"first_k_dense_replace": 2}),
    Variant("glm4_moe_lite", {"mlp_layer_types": ["sparse", "dense", "sparse", "sparse"]}),
    Variant("llama", {"final_logit_softcapping": 5.0}),
]
SAMPLE = random.Random(0).sample([*table(), *map(mutated, range(200))], 16)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("variant", HONOURED, ids=str)
def test_honoured(variant: Variant, tmp_path: Path) -> None:
    assert outcome(variant, tmp_path / "model", exports=True) == "honoured"


@pytest.mark.parametrize("variant", REFUSED, ids=str)
def test_refused(variant: Variant, tmp_path: Path) -> None:
    assert outcome(variant, tmp_path / "model") == "refused"


def test_no_third_outcome_in_a_sample() -> None:
    counts, failed = failures(iter(SAMPLE), exports=False)
    assert failed == []
    assert min(counts["honoured"], counts["refused"]) > 2


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("part", range(10))
def test_no_third_outcome_in_the_whole_table(part: int) -> None:
    """`model_variants.py` exports each of them too."""
    counts, failed = failures(iter(table()[part::10]), exports=False)
    assert failed == []
    assert counts["honoured"] > 20


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("part", range(5))
def test_no_third_outcome_in_mutated_models(part: int) -> None:
    seeds = range(10_000 + 100 * part, 10_100 + 100 * part)
    counts, failed = failures(map(mutated, seeds), exports=False)
    assert failed == []
    assert min(counts["honoured"], counts["refused"]) > 4
