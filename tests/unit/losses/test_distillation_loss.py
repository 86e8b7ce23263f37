"""The distillation loss against sums over the whole vocabulary, finite differences, and cuts of the batch."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_checks import (
    NUM_TOKENS,
    average,
    check_finite_differences,
    check_invariance,
    counted,
    evaluate,
    random_batch,
)

from nemo_rl_offload.batching.batch import Batch
from nemo_rl_offload.losses.registry import build_loss

CONFIGS = st.fixed_dictionaries(
    {
        "kl_type": st.sampled_from(["forward", "reverse", "mixed"]),
        "mixed_kl_weight": st.sampled_from([0.0, 0.3, 1.0]),
        "zero_outside_topk": st.booleans(),
    }
)
SEEDS = st.integers(0, 10_000)


def divergence(p: list[float], log_q: list[float]) -> float:
    return sum(a * (math.log(a) - b) for a, b in zip(p, log_q, strict=True) if a > 0)


def reference(batch: Batch, config: dict[str, Any]) -> float:
    """Both distributions written out over the vocabulary, token by token."""
    values = {}
    for i, row in enumerate(counted(batch)):
        for t in row:
            top = batch["teacher_topk_indices"][i, t].tolist()
            weights = [math.exp(logit) for logit in batch["teacher_topk_logits"][i, t].tolist()]
            teacher = {token: weight / sum(weights) for token, weight in zip(top, weights, strict=True)}
            exps = [math.exp(logit) for logit in batch["logits"][i, t].tolist()]
            tokens = range(NUM_TOKENS) if config["zero_outside_topk"] else top
            student = {token: exps[token] / sum(exps[u] for u in tokens) for token in tokens}
            log_teacher = [math.log(teacher[token]) if token in teacher else -100.0 for token in tokens]
            forward = divergence([teacher.get(u, 0.0) for u in tokens], [math.log(student[u]) for u in tokens])
            reverse = divergence([student[u] for u in tokens], log_teacher)
            weight = {"forward": 1.0, "reverse": 0.0, "mixed": config["mixed_kl_weight"]}[config["kl_type"]]
            values[i, t] = weight * forward + (1 - weight) * reverse
    return average(values, batch, True)


@given(seed=SEEDS, config=CONFIGS)
@settings(max_examples=80, deadline=None)
def test_matches_plain_python(seed: int, config: dict[str, Any]) -> None:
    batch = random_batch(seed)
    loss, metrics = evaluate(build_loss("distillation", config), batch)
    assert loss == pytest.approx(reference(batch, config), rel=1e-5, abs=1e-6)
    assert metrics["loss"] == loss


@given(seed=SEEDS, config=CONFIGS)
@settings(max_examples=10, deadline=None)
def test_gradients_match_finite_differences(seed: int, config: dict[str, Any]) -> None:
    check_finite_differences(build_loss("distillation", config), random_batch(seed, num_samples=2, width=4))


@given(seed=SEEDS, config=CONFIGS, num_shards=st.integers(1, 4), size=st.integers(1, 3))
@settings(max_examples=30, deadline=None)
def test_invariant_to_shards_and_microbatches(seed: int, config: dict[str, Any], num_shards: int, size: int) -> None:
    check_invariance(build_loss("distillation", config), random_batch(seed), num_shards, size)


@pytest.mark.parametrize("kl_type", ["forward", "reverse", "mixed"])
@pytest.mark.parametrize("zero_outside_topk", [True, False])
def test_zero_for_a_student_that_is_the_teacher(kl_type: str, zero_outside_topk: bool) -> None:
    config = {"kl_type": kl_type, "mixed_kl_weight": 0.5, "zero_outside_topk": zero_outside_topk}
    batch = random_batch(2)
    inside = torch.zeros_like(batch["logits"], dtype=torch.bool).scatter(-1, batch["teacher_topk_indices"], True)
    batch["logits"] = torch.full_like(batch["logits"], -80.0).scatter(
        -1, batch["teacher_topk_indices"], batch["teacher_topk_logits"]
    )
    assert evaluate(build_loss("distillation", config), batch)[0] == pytest.approx(0, abs=1e-6)
    batch["logits"] = batch["logits"] + inside * torch.arange(NUM_TOKENS)
    assert evaluate(build_loss("distillation", config), batch)[0] > 0.1


def test_only_what_needs_the_entropy_asks_for_it() -> None:
    def required(**config: Any) -> set[str]:
        return set(build_loss("distillation", {"mixed_kl_weight": 0.5, **config}).required)

    assert "entropy" in required(kl_type="reverse", zero_outside_topk=True)
    assert "entropy" in required(kl_type="mixed", zero_outside_topk=True)
    assert "entropy" not in required(kl_type="forward", zero_outside_topk=True)
    assert "entropy" not in required(kl_type="mixed", zero_outside_topk=False)
