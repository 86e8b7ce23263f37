"""Losses against a plain-Python reference, finite differences, and invariance to cuts of the batch."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nemo_rl_offload.batching.batch import Batch, microbatches, shard
from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.losses.policy_gradient import kl_k3
from nemo_rl_offload.losses.reduction import normalizers
from nemo_rl_offload.losses.registry import Loss, build_loss

CONFIGS = st.fixed_dictionaries(
    {
        "ratio_clip_min": st.sampled_from([0.1, 0.2]),
        "ratio_clip_max": st.sampled_from([0.2, 0.4]),
        "reference_policy_kl_penalty": st.sampled_from([0.0, 0.3]),
        "token_level_loss": st.booleans(),
    }
)
SEEDS = st.integers(0, 10_000)


def random_batch(seed: int, num_samples: int = 5, width: int = 6) -> Batch:
    """A float64 batch with random masks and lengths; the last column is always padding."""
    generator = torch.Generator().manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(num_samples, width, generator=generator, dtype=torch.float64)

    lengths = torch.randint(1, width, (num_samples,), generator=generator)
    inside = torch.arange(width) < lengths[:, None]
    logprobs = -normal().abs() - 0.1
    return {
        "input_ids": torch.randint(0, 9, (num_samples, width), generator=generator),
        "input_lengths": lengths,
        "logprobs": logprobs,
        "prev_logprobs": logprobs + 0.3 * normal(),
        "reference_policy_logprobs": logprobs + 0.5 * normal(),
        "advantages": normal(),
        "token_mask": inside & (torch.rand(num_samples, width, generator=generator) < 0.8),
        "sample_mask": (torch.rand(num_samples, generator=generator) < 0.8).float(),
    }


def counted(batch: Batch) -> list[list[int]]:
    """For each valid sample, its token positions that count."""
    num_samples, width = batch["token_mask"].shape
    return [
        [t for t in range(1, width) if batch["token_mask"][i, t]] if batch["sample_mask"][i] else []
        for i in range(num_samples)
    ]


def average(values: dict[tuple[int, int], float], batch: Batch, token_level: bool) -> float:
    positions = counted(batch)
    if token_level:
        return sum(values.values()) / max(1, sum(map(len, positions)))
    means = [sum(values[i, t] for t in row) / len(row) for i, row in enumerate(positions) if row]
    return sum(means) / max(1, int(batch["sample_mask"].sum()))


def reference_clipped_pg(batch: Batch, config: dict[str, float]) -> tuple[float, dict[str, float]]:
    loss, kl, ratio_sum, clipped, kl_old, entropy = {}, {}, {}, {}, {}, {}
    for i, row in enumerate(counted(batch)):
        for t in row:
            new, old, ref, advantage = (
                batch[key][i, t].item()
                for key in ("logprobs", "prev_logprobs", "reference_policy_logprobs", "advantages")
            )
            ratio = math.exp(new - old)
            low, high = 1 - config["ratio_clip_min"], 1 + config["ratio_clip_max"]
            outside = (advantage > 0 and ratio > high) or (advantage < 0 and ratio < low)
            kl[i, t] = math.exp(ref - new) - 1 - (ref - new)
            bounded = min(max(ratio, low), high) if outside else ratio
            loss[i, t] = -bounded * advantage + config["reference_policy_kl_penalty"] * kl[i, t]
            ratio_sum[i, t], clipped[i, t], entropy[i, t] = ratio, float(outside), -ratio * new
            kl_old[i, t] = ratio - 1 - (new - old)
    token_level = bool(config["token_level_loss"])
    metrics = {
        "loss": average(loss, batch, token_level),
        "probs_ratio": average(ratio_sum, batch, True),
        "clip_fraction": average(clipped, batch, True),
        "approx_kl": average(kl_old, batch, True),
        "approx_entropy": average(entropy, batch, True),
    }
    if config["reference_policy_kl_penalty"]:
        metrics["kl_penalty"] = average(kl, batch, token_level)
    return metrics["loss"], metrics


@given(seed=SEEDS, config=CONFIGS)
@settings(max_examples=60, deadline=None)
def test_clipped_pg_matches_plain_python(seed: int, config: dict[str, float]) -> None:
    batch = random_batch(seed)
    loss, metrics = build_loss("clipped_pg", config)(batch["logprobs"], batch, normalizers(batch))
    expected_loss, expected_metrics = reference_clipped_pg(batch, config)
    assert loss.item() == pytest.approx(expected_loss, rel=1e-9, abs=1e-12)
    for name, expected in expected_metrics.items():
        assert metrics[name].item() == pytest.approx(expected, rel=1e-9, abs=1e-12), name


@given(seed=SEEDS)
@settings(max_examples=30, deadline=None)
def test_nll_matches_plain_python(seed: int) -> None:
    batch = random_batch(seed)
    loss, metrics = build_loss("nll", {})(batch["logprobs"], batch, normalizers(batch))
    values = {(i, t): -batch["logprobs"][i, t].item() for i, row in enumerate(counted(batch)) for t in row}
    assert loss.item() == pytest.approx(average(values, batch, True), rel=1e-9)
    assert metrics["loss"].item() == loss.item()


@given(seed=SEEDS, config=CONFIGS)
@settings(max_examples=15, deadline=None)
def test_gradients_match_finite_differences(seed: int, config: dict[str, float]) -> None:
    batch = random_batch(seed, num_samples=3, width=4)
    norm = normalizers(batch)
    for loss_fn in (build_loss("clipped_pg", config), build_loss("nll", {})):
        logprobs = batch["logprobs"].clone().requires_grad_()
        assert torch.autograd.gradcheck(lambda x, f=loss_fn: f(x, batch, norm)[0], (logprobs,))


def gradient_and_metrics(loss_fn: Loss, pieces: list[Batch], whole: Batch) -> tuple[Tensor, dict[str, float]]:
    norm = normalizers(whole)
    gradients, totals = torch.zeros_like(whole["logprobs"]), dict[str, float]()
    for piece in pieces:
        logprobs = piece["logprobs"].clone().requires_grad_()
        loss, metrics = loss_fn(logprobs, piece, norm)
        (gradient_BS,) = torch.autograd.grad(loss, logprobs)
        for row, gradient in zip(piece["row"], gradient_BS, strict=True):
            gradients[row, : len(gradient)] += gradient
        for name, value in metrics.items():
            totals[name] = totals.get(name, 0.0) + value.item()
    return gradients, totals


@given(seed=SEEDS, config=CONFIGS, num_shards=st.integers(1, 4), micro_size=st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_invariant_to_shards_and_microbatches(
    seed: int, config: dict[str, float], num_shards: int, micro_size: int
) -> None:
    batch = random_batch(seed) | {"row": torch.arange(5)}
    pieces = [micro for part in shard(batch, num_shards) for micro in microbatches(part, micro_size)]
    for loss_fn in (build_loss("clipped_pg", config), build_loss("nll", {})):
        expected_gradient, expected_totals = gradient_and_metrics(loss_fn, [batch], batch)
        gradient, totals = gradient_and_metrics(loss_fn, pieces, batch)
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-12, atol=1e-14)
        assert totals == pytest.approx(expected_totals, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("token_level", [True, False])
def test_values_outside_the_masks_change_nothing(token_level: bool) -> None:
    config = {"ratio_clip_min": 0.2, "ratio_clip_max": 0.2, "reference_policy_kl_penalty": 0.1}
    loss_fn = build_loss("clipped_pg", config | {"token_level_loss": token_level})
    batch = random_batch(3)
    norm = normalizers(batch)
    ignored = ~(batch["token_mask"] & batch["sample_mask"].bool()[:, None])
    ignored[:, 0] = True
    changed = dict(batch)
    for key, value in (("logprobs", -math.inf), ("prev_logprobs", -math.inf), ("advantages", math.nan)):
        changed[key] = batch[key].masked_fill(ignored, value)
    logprobs = changed["logprobs"].requires_grad_()
    loss, _ = loss_fn(logprobs, changed, norm)
    loss.backward()
    assert loss.item() == loss_fn(batch["logprobs"], batch, norm)[0].item()
    assert logprobs.grad is not None
    assert torch.isfinite(logprobs.grad).all()
    assert (logprobs.grad[ignored] == 0).all()


def test_no_advantage_gives_no_gradient_and_an_empty_batch_gives_zero() -> None:
    config = {
        "ratio_clip_min": 0.2,
        "ratio_clip_max": 0.2,
        "reference_policy_kl_penalty": 0.0,
        "token_level_loss": True,
    }
    loss_fn = build_loss("clipped_pg", config)
    batch = random_batch(4)
    flat = batch | {"advantages": torch.zeros_like(batch["advantages"])}
    logprobs = batch["logprobs"].clone().requires_grad_()
    loss_fn(logprobs, flat, normalizers(flat))[0].backward()
    assert logprobs.grad is not None
    assert (logprobs.grad == 0).all()
    empty = batch | {"sample_mask": torch.zeros(5)}
    assert loss_fn(batch["logprobs"], empty, normalizers(empty))[0].item() == 0


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("difference", [200.0, -200.0])
def test_extreme_ratios_stay_finite(advantage: float, difference: float) -> None:
    config = {
        "ratio_clip_min": 0.2,
        "ratio_clip_max": 0.2,
        "reference_policy_kl_penalty": 0.1,
        "token_level_loss": True,
    }
    logprobs = torch.tensor([[0.0, min(0.0, difference)]], requires_grad=True)
    batch = {
        "prev_logprobs": torch.tensor([[0.0, min(0.0, -difference)]]),
        "reference_policy_logprobs": torch.tensor([[0.0, min(0.0, -difference)]]),
        "advantages": torch.full((1, 2), advantage),
        "token_mask": torch.ones(1, 2),
        "sample_mask": torch.ones(1),
    }
    loss, metrics = build_loss("clipped_pg", config)(logprobs, batch, normalizers(batch))
    loss.backward()
    assert logprobs.grad is not None
    assert torch.isfinite(torch.stack([loss.detach(), *metrics.values(), *logprobs.grad.flatten()])).all()


def test_kl_k3_estimates_the_divergence() -> None:
    """Averaged over the policy's own distribution, the estimate is the exact divergence."""
    policy, reference = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.2, 0.6]], dtype=torch.float64)
    exact = (policy * (policy / reference).log()).sum()
    estimate = (policy * kl_k3(policy.log(), reference.log())).sum()
    assert estimate.item() == pytest.approx(exact.item(), rel=1e-12)


def test_registry_names_the_keys_and_refuses_unknown_losses() -> None:
    config = {"ratio_clip_min": 0.2, "ratio_clip_max": 0.2, "token_level_loss": True}
    without = build_loss("clipped_pg", config | {"reference_policy_kl_penalty": 0.0})
    with_kl = build_loss("clipped_pg", config | {"reference_policy_kl_penalty": 0.1})
    assert set(with_kl.required) - set(without.required) == {"reference_policy_logprobs"}
    batch = random_batch(1)
    for loss_fn in (without, with_kl, build_loss("nll", {})):
        needed = {key: batch[key] for key in loss_fn.required}
        assert torch.isfinite(loss_fn(batch["logprobs"], needed, normalizers(batch))[0])
    with pytest.raises(ConfigError, match="Did you mean 'clipped_pg'"):
        build_loss("cliped_pg", {})
