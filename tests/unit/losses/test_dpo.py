"""DPO against plain Python, finite differences, and cuts of the batch."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_checks import check_finite_differences, check_invariance, counted, evaluate, random_batch, scores

from nemo_rl_offload.batching.batch import Batch
from nemo_rl_offload.losses.registry import build_loss

CONFIGS = st.fixed_dictionaries(
    {
        "reference_policy_kl_penalty": st.sampled_from([0.1, 0.7]),
        "label_smoothing": st.sampled_from([0.0, 0.2]),
        "preference_average_log_probs": st.booleans(),
        "sft_average_log_probs": st.booleans(),
        "preference_loss_weight": st.sampled_from([1.0, 0.5]),
        "sft_loss_weight": st.sampled_from([0.0, 0.3]),
    }
)
SEEDS = st.integers(0, 10_000)


def make_pairs(seed: int, num_pairs: int = 3, width: int = 6) -> Batch:
    """Rows alternate; a sample is valid or not as a pair."""
    batch = random_batch(seed, 2 * num_pairs, width)
    batch["sample_mask"] = batch["sample_mask"][0::2].repeat_interleave(2)
    return batch


def reference(batch: Batch, config: dict[str, Any]) -> dict[str, float]:
    logprobs = scores(batch["logits"], batch)[0]
    beta, smoothing = config["reference_policy_kl_penalty"], config["label_smoothing"]
    positions = counted(batch)
    totals = dict.fromkeys(("preference_loss", "sft_loss", "accuracy", "rewards_chosen_mean"), 0.0)
    pairs = [pair for pair in range(len(positions) // 2) if batch["sample_mask"][2 * pair]]
    for pair in pairs:
        rewards, policies = [], []
        for row in (2 * pair, 2 * pair + 1):
            policy = [logprobs[row, t].item() for t in positions[row]]
            ref = [batch["reference_policy_logprobs"][row, t].item() for t in positions[row]]
            count = max(1, len(policy))
            divisor = count if config["preference_average_log_probs"] else 1
            rewards.append(beta * (sum(policy) - sum(ref)) / divisor)
            policies.append(sum(policy) / (count if config["sft_average_log_probs"] else 1))
        preferred = 1 / (1 + math.exp(rewards[1] - rewards[0]))
        totals["preference_loss"] -= (1 - smoothing) * math.log(preferred) + smoothing * math.log(1 - preferred)
        totals["sft_loss"] -= policies[0]
        totals["accuracy"] += rewards[0] > rewards[1]
        totals["rewards_chosen_mean"] += rewards[0]
    means = {name: total / max(1, len(pairs)) for name, total in totals.items()}
    weights = config["preference_loss_weight"], config["sft_loss_weight"]
    return means | {"loss": weights[0] * means["preference_loss"] + weights[1] * means["sft_loss"]}


@given(seed=SEEDS, config=CONFIGS)
@settings(max_examples=80, deadline=None)
def test_matches_plain_python(seed: int, config: dict[str, Any]) -> None:
    batch = make_pairs(seed)
    loss, metrics = evaluate(build_loss("dpo", config), batch)
    expected = reference(batch, config)
    assert loss == pytest.approx(expected["loss"], rel=1e-9, abs=1e-12)
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, rel=1e-9, abs=1e-12), name


@given(seed=SEEDS, config=CONFIGS)
@settings(max_examples=15, deadline=None)
def test_gradients_match_finite_differences(seed: int, config: dict[str, Any]) -> None:
    check_finite_differences(build_loss("dpo", config), make_pairs(seed, num_pairs=2, width=4))


@given(seed=SEEDS, config=CONFIGS, num_shards=st.integers(1, 4), size=st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_invariant_to_shards_and_microbatches(seed: int, config: dict[str, Any], num_shards: int, size: int) -> None:
    check_invariance(build_loss("dpo", config), make_pairs(seed), num_shards, size)


def test_the_start_model_is_indifferent() -> None:
    """Where policy and reference agree, the loss is log 2 whatever the responses."""
    batch = make_pairs(5)
    batch["sample_mask"] = torch.ones(6)
    batch["reference_policy_logprobs"] = scores(batch["logits"], batch)[0]
    config = {
        "reference_policy_kl_penalty": 0.1,
        "label_smoothing": 0.0,
        "preference_average_log_probs": False,
        "sft_average_log_probs": False,
        "preference_loss_weight": 1.0,
        "sft_loss_weight": 0.0,
    }
    assert evaluate(build_loss("dpo", config), batch)[0] == pytest.approx(math.log(2))
