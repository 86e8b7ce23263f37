"""Every key of every family's `config.json`, and mutated ones: the loss of transformers, or a refusal by name."""

import itertools
import random
from pathlib import Path

import pytest
from model_variants import Variant, failures, mutated, outcome, table

pytestmark = pytest.mark.usefixtures("megatron_process_group")

_SCALED = {"rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
_LLAMA3 = {**_SCALED, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_YARN = {**_SCALED, "rope_type": "yarn", "attention_factor": 1.3}
_WINDOW = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}
HONOURED = [
    Variant("llama", {"attention_bias": True, "rope_parameters": _LLAMA3}),
    Variant("llama", {"mlp_bias": True, "rope_scaling": {"type": "linear", "factor": 2.0}}),
    Variant("mistral", {"sliding_window": 8, "hidden_act": "gelu"}),
    Variant("qwen2", {**_WINDOW, "head_dim": 24}),
    Variant("qwen3", {"attention_bias": True, "rope_parameters": _YARN}),
    Variant("qwen3_moe", {"mlp_only_layers": [0, 2], "norm_topk_prob": False, "attention_bias": True}),
    Variant("deepseek_v2", {"q_lora_rank": None, "rms_norm_eps": 1e-2}),
    Variant("deepseek_v3", {"n_group": 2, "topk_group": 1, "n_shared_experts": 3}),
    Variant("gpt_oss", {"sliding_window": 4, "num_experts_per_tok": 3}),
    Variant("gemma", {"head_dim": 24}),
    Variant("glm4_moe", {"attention_bias": True, "use_qk_norm": True, "n_shared_experts": 3}),
]
"""What Megatron-Bridge alone leaves out, or takes for something else."""
REFUSED = [
    Variant("qwen2", {"attention_bias": True}),
    Variant("qwen3", {"use_qk_norm": True}),
    Variant("deepseek_v3", {"num_experts_per_tok": 1}),
    Variant("gemma", {"tie_word_embeddings": False}),
    Variant("llama", {"final_logit_softcapping": 5.0}),
]
SAMPLE = random.Random(0).sample([*table(), *map(mutated, range(200))], 16)


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
def test_no_third_outcome_in_the_whole_table() -> None:
    counts, failed = failures(iter(table()), exports=True)
    assert failed == []
    assert counts["honoured"] > 200


@pytest.mark.slow
def test_no_third_outcome_in_mutated_models() -> None:
    counts, failed = failures(map(mutated, itertools.islice(itertools.count(10_000), 500)), exports=False)
    assert failed == []
    assert min(counts["honoured"], counts["refused"]) > 20
