"""The supervised loss, and losses by name."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_checks import average, check_finite_differences, check_invariance, counted, evaluate, random_batch, scores

from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.losses.reduction import normalizers
from nemo_rl_offload.losses.registry import LOSSES, build_loss, rows_per_sample

NLL = build_loss("nll", {})
SEEDS = st.integers(0, 10_000)
CONFIG = {
    "ratio_clip_min": 0.2,
    "ratio_clip_max": 0.2,
    "ratio_clip_c": 3.0,
    "force_on_policy_ratio": False,
    "disable_ppo_ratio": False,
    "use_cispo": False,
    "sequence_level_importance_ratios": False,
    "use_importance_sampling_correction": True,
    "truncated_importance_sampling_type": None,
    "truncated_importance_sampling_ratio": 2.0,
    "truncated_importance_sampling_ratio_min": None,
    "reference_policy_kl_penalty": 0.1,
    "reference_policy_kl_type": "k3",
    "kl_input_clamp_value": 20.0,
    "kl_output_clamp_value": 10.0,
    "use_kl_in_reward": False,
    "use_on_policy_kl_approximation": False,
    "entropy_coeff": 0.1,
    "token_level_loss": True,
    "label_smoothing": 0.1,
    "preference_average_log_probs": False,
    "sft_average_log_probs": False,
    "preference_loss_weight": 1.0,
    "sft_loss_weight": 0.1,
    "kl_type": "mixed",
    "mixed_kl_weight": 0.5,
    "zero_outside_topk": True,
}


@given(seed=SEEDS)
@settings(max_examples=30, deadline=None)
def test_nll_matches_plain_python(seed: int) -> None:
    batch = random_batch(seed)
    loss, metrics = evaluate(NLL, batch)
    logprobs = scores(batch["logits"], batch)[0]
    values = {(i, t): -logprobs[i, t].item() for i, row in enumerate(counted(batch)) for t in row}
    assert loss == pytest.approx(average(values, batch, True), rel=1e-9)
    assert metrics["loss"] == loss


@given(seed=SEEDS, num_shards=st.integers(1, 4), size=st.integers(1, 3))
@settings(max_examples=20, deadline=None)
def test_nll_gradients(seed: int, num_shards: int, size: int) -> None:
    check_finite_differences(NLL, random_batch(seed, num_samples=3, width=4))
    check_invariance(NLL, random_batch(seed), num_shards, size)


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_takes_its_keys_and_reads_what_it_requires(name: str) -> None:
    loss_fn = build_loss(name, CONFIG)
    assert loss_fn.rows_per_sample == rows_per_sample(name) == (2 if name == "dpo" else 1)
    batch = random_batch(1)
    logprobs, scored = scores(batch["logits"], batch)
    needed = {key: scored[key] for key in loss_fn.required}
    assert torch.isfinite(loss_fn(logprobs, needed, normalizers(batch))[0])
    for key in needed:
        with pytest.raises(KeyError, match=key):
            loss_fn(logprobs, {k: v for k, v in needed.items() if k != key}, normalizers(batch))


def test_unknown_losses_are_refused() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'clipped_pg'"):
        build_loss("cliped_pg", {})
