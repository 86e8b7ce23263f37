"""The policy-gradient loss and its variants against plain Python, finite differences, and cuts of the batch."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_checks import average, check_finite_differences, check_invariance, counted, evaluate, random_batch, scores

from nemo_rl_offload.batching.batch import Batch
from nemo_rl_offload.losses.clipped_pg import kl_estimate
from nemo_rl_offload.losses.reduction import normalizers
from nemo_rl_offload.losses.registry import Loss, build_loss

PLAIN: dict[str, Any] = {
    "ratio_clip_min": 0.2,
    "ratio_clip_max": 0.2,
    "ratio_clip_c": None,
    "force_on_policy_ratio": False,
    "disable_ppo_ratio": False,
    "use_cispo": False,
    "sequence_level_importance_ratios": False,
    "use_importance_sampling_correction": False,
    "truncated_importance_sampling_type": None,
    "truncated_importance_sampling_ratio": None,
    "truncated_importance_sampling_ratio_min": None,
    "reference_policy_kl_penalty": 0.0,
    "reference_policy_kl_type": "k3",
    "kl_input_clamp_value": 20.0,
    "kl_output_clamp_value": 10.0,
    "use_kl_in_reward": False,
    "use_on_policy_kl_approximation": False,
    "entropy_coeff": 0.0,
    "token_level_loss": True,
}
CONFIGS = st.fixed_dictionaries(
    {
        "ratio_clip_min": st.sampled_from([0.1, 0.2]),
        "ratio_clip_max": st.sampled_from([0.2, 0.4]),
        "ratio_clip_c": st.sampled_from([None, 1.2]),
        "force_on_policy_ratio": st.just(False),
        "disable_ppo_ratio": st.just(False),
        "use_cispo": st.booleans(),
        "sequence_level_importance_ratios": st.booleans(),
        "use_importance_sampling_correction": st.booleans(),
        "truncated_importance_sampling_type": st.sampled_from([None, "tis", "icepop", "seq-mask-tis"]),
        "truncated_importance_sampling_ratio": st.sampled_from([None, 1.1]),
        "truncated_importance_sampling_ratio_min": st.sampled_from([None, 0.7]),
        "reference_policy_kl_penalty": st.sampled_from([0.0, 0.3]),
        "reference_policy_kl_type": st.sampled_from(["k1", "k2", "k3"]),
        "kl_input_clamp_value": st.sampled_from([None, 20.0, 0.3]),
        "kl_output_clamp_value": st.sampled_from([None, 10.0, 0.1]),
        "use_kl_in_reward": st.booleans(),
        "use_on_policy_kl_approximation": st.booleans(),
        "entropy_coeff": st.sampled_from([0.0, 0.1]),
        "token_level_loss": st.booleans(),
    }
)
SEEDS = st.integers(0, 10_000)


def build(**changes: Any) -> Loss:
    return build_loss("clipped_pg", PLAIN | changes)


def bounded(weight: float, gaps: list[float], config: dict[str, Any]) -> tuple[float, bool]:
    """An importance weight within the bounds, and whether it was beyond; `gaps` are those of the response's tokens."""
    kind = config["truncated_importance_sampling_type"]
    most = config["truncated_importance_sampling_ratio"] or math.inf
    least = config["truncated_importance_sampling_ratio_min"] or 0.0
    if kind == "seq-mask-tis":
        is_beyond = not least <= math.prod(map(math.exp, gaps)) ** (1 / len(gaps)) <= most
        return (0.0 if is_beyond else weight), is_beyond
    is_beyond = not least <= weight <= most
    if kind == "icepop":
        return (0.0 if is_beyond else weight), is_beyond
    return min(max(weight, least), most), is_beyond


def reference(batch: Batch, config: dict[str, Any]) -> dict[str, float]:
    """Loss and metrics, one token after the other."""
    logprobs, scored = scores(batch["logits"], batch)
    names = ("loss", "kl_penalty", "entropy", "probs_ratio", "clip_fraction", "approx_kl")
    names += ("sampling_importance_ratio", "is_oob_ratio")
    values: dict[str, dict[tuple[int, int], float]] = {name: {} for name in names}
    for i, row in enumerate(counted(batch)):
        new = {t: logprobs[i, t].item() for t in row}
        old, gen, ref = (
            {t: batch[f"{name}_logprobs"][i, t].item() for t in row}
            for name in ("prev", "generation", "reference_policy")
        )
        for t in row:
            ratio, weight = math.exp(new[t] - old[t]), math.exp(old[t] - gen[t])
            if config["sequence_level_importance_ratios"]:
                ratio = math.exp(sum(new[u] - old[u] for u in row) / len(row))
                weight = math.exp(sum(old[u] - gen[u] for u in row))
            advantage = batch["advantages"][i, t].item()
            low, high = 1 - config["ratio_clip_min"], 1 + config["ratio_clip_max"]
            outside = binds = (advantage > 0 and ratio > high) or (advantage < 0 and ratio < low)
            if config["use_cispo"]:
                binds = advantage != 0 and not low <= ratio <= high
                loss = -min(max(ratio, low), high) * advantage * new[t]
            else:
                loss = -(min(max(ratio, low), high) if outside else ratio) * advantage
                if advantage < 0 and config["ratio_clip_c"]:
                    binds = binds or ratio > config["ratio_clip_c"]
                    loss = min(loss, -advantage * config["ratio_clip_c"])
            weight, is_beyond = bounded(weight, [old[u] - gen[u] for u in row], config)
            loss *= weight if config["use_importance_sampling_correction"] else 1
            d = ref[t] - new[t]
            if (most := config["kl_input_clamp_value"]) is not None:
                d = max(-most, min(d, most))
            kl = {"k1": -d, "k2": d * d / 2, "k3": math.exp(d) - 1 - d}[config["reference_policy_kl_type"]]
            kl *= math.exp(new[t] - gen[t]) if config["use_on_policy_kl_approximation"] else 1
            if (most := config["kl_output_clamp_value"]) is not None:
                kl = max(-most, min(kl, most))
            entropy = scored["entropy"][i, t].item()
            penalty = 0 if config["use_kl_in_reward"] else config["reference_policy_kl_penalty"]
            values["loss"][i, t] = loss + penalty * kl - config["entropy_coeff"] * entropy
            values["kl_penalty"][i, t], values["entropy"][i, t] = kl, entropy
            values["probs_ratio"][i, t], values["clip_fraction"][i, t] = ratio, float(binds)
            values["approx_kl"][i, t] = math.exp(new[t] - old[t]) - 1 - (new[t] - old[t])
            values["sampling_importance_ratio"][i, t], values["is_oob_ratio"][i, t] = weight, float(is_beyond)
    level = dict.fromkeys(("loss", "kl_penalty", "entropy"), config["token_level_loss"])
    return {name: average(value, batch, level.get(name, True)) for name, value in values.items()}


@given(seed=SEEDS, config=CONFIGS)
@settings(max_examples=150, deadline=None)
def test_matches_plain_python(seed: int, config: dict[str, Any]) -> None:
    batch = random_batch(seed)
    loss, metrics = evaluate(build_loss("clipped_pg", config), batch)
    expected = reference(batch, config)
    assert loss == pytest.approx(expected["loss"], rel=1e-9, abs=1e-12)
    for name in expected.keys() & metrics.keys():
        assert metrics[name] == pytest.approx(expected[name], rel=1e-9, abs=1e-12), name
    has_kl = config["reference_policy_kl_penalty"] > 0 and not config["use_kl_in_reward"]
    assert ("kl_penalty" in metrics) == has_kl
    assert ("entropy" in metrics) == (config["entropy_coeff"] > 0)


def _is_a_function_of_values(config: dict[str, Any]) -> bool:
    """Not where a gradient is stopped: at CISPO's ratio, and at weights of clamped differences."""
    return not (config["use_cispo"] or (config["use_on_policy_kl_approximation"] and config["kl_input_clamp_value"]))


@given(seed=SEEDS, config=CONFIGS.filter(_is_a_function_of_values))
@settings(max_examples=20, deadline=None)
def test_gradients_match_finite_differences(seed: int, config: dict[str, Any]) -> None:
    check_finite_differences(build_loss("clipped_pg", config), random_batch(seed, num_samples=3, width=4))


@given(seed=SEEDS, config=CONFIGS)
@settings(max_examples=20, deadline=None)
def test_cispo_is_reinforce_with_fixed_weights(seed: int, config: dict[str, Any]) -> None:
    """The gradient stops at the ratio: that of `log p`, weighted by what the ratio is now."""
    config |= {"use_cispo": True, "reference_policy_kl_penalty": 0.0, "entropy_coeff": 0.0}
    batch = random_batch(seed)
    norm = normalizers(batch)
    logprobs = scores(batch["logits"], batch)[0].requires_grad_()
    loss_fn = build_loss("clipped_pg", config)
    (gradient,) = torch.autograd.grad(loss_fn(logprobs, batch, norm)[0], logprobs)
    for i, row in enumerate(counted(batch)):
        for t in row:
            ratios = [(logprobs[i, u] - batch["prev_logprobs"][i, u]).item() for u in row]
            mean = sum(ratios) / len(row) if config["sequence_level_importance_ratios"] else ratios[row.index(t)]
            weight = min(max(math.exp(mean), 1 - config["ratio_clip_min"]), 1 + config["ratio_clip_max"])
            if config["use_importance_sampling_correction"]:
                gaps = [(batch["prev_logprobs"] - batch["generation_logprobs"])[i, u].item() for u in row]
                gap = sum(gaps) if config["sequence_level_importance_ratios"] else gaps[row.index(t)]
                weight *= bounded(math.exp(gap), gaps, config)[0]
            count = norm.global_valid_tokens if config["token_level_loss"] else norm.global_valid_seqs * len(row)
            expected = -weight * batch["advantages"][i, t].item() / count.item()
            assert gradient[i, t].item() == pytest.approx(expected, rel=1e-6)


@given(seed=SEEDS, config=CONFIGS, num_shards=st.integers(1, 4), size=st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_invariant_to_shards_and_microbatches(seed: int, config: dict[str, Any], num_shards: int, size: int) -> None:
    check_invariance(build_loss("clipped_pg", config), random_batch(seed), num_shards, size)


@pytest.mark.parametrize("changes", [{}, {"token_level_loss": False, "sequence_level_importance_ratios": True}])
def test_values_outside_the_masks_change_nothing(changes: dict[str, Any]) -> None:
    loss_fn = build(reference_policy_kl_penalty=0.1, use_importance_sampling_correction=True, **changes)
    batch = random_batch(3)
    norm = normalizers(batch)
    batch["logprobs"] = scores(batch["logits"], batch)[0]
    ignored = ~(batch["token_mask"] & batch["sample_mask"].bool()[:, None])
    ignored[:, 0] = True
    changed = dict(batch)
    for key in ("logprobs", "prev_logprobs", "generation_logprobs"):
        changed[key] = batch[key].masked_fill(ignored, -math.inf)
    changed["advantages"] = batch["advantages"].masked_fill(ignored, math.nan)
    logprobs = changed["logprobs"].requires_grad_()
    loss, _ = loss_fn(logprobs, changed, norm)
    loss.backward()
    assert loss.item() == loss_fn(batch["logprobs"], batch, norm)[0].item()
    assert logprobs.grad is not None
    assert torch.isfinite(logprobs.grad).all()
    assert (logprobs.grad[ignored] == 0).all()


def test_no_advantage_gives_no_gradient_and_an_empty_batch_gives_zero() -> None:
    batch = random_batch(4)
    flat = batch | {"advantages": torch.zeros_like(batch["advantages"])}
    logprobs = scores(batch["logits"], batch)[0].requires_grad_()
    build()(logprobs, flat, normalizers(flat))[0].backward()
    assert logprobs.grad is not None
    assert (logprobs.grad == 0).all()
    empty = batch | {"sample_mask": torch.zeros(6)}
    assert evaluate(build(), empty)[0] == 0


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("difference", [200.0, 85.0, -85.0, -99.0, -200.0])
@pytest.mark.parametrize("input_clamp", [20.0, None])
def test_extreme_ratios_stay_finite(advantage: float, difference: float, input_clamp: float | None) -> None:
    logprobs = torch.tensor([[0.0, min(0.0, difference)]], requires_grad=True)
    far = torch.tensor([[0.0, min(0.0, -difference)]])
    batch = {
        **dict.fromkeys(("prev_logprobs", "reference_policy_logprobs", "generation_logprobs"), far),
        "advantages": torch.full((1, 2), advantage),
        "token_mask": torch.ones(1, 2),
        "sample_mask": torch.ones(1),
    }
    settings = {"reference_policy_kl_penalty": 0.1, "use_importance_sampling_correction": True}
    loss_fn = build(**settings, kl_input_clamp_value=input_clamp)
    loss, metrics = loss_fn(logprobs, batch, normalizers(batch))
    loss.backward()
    assert logprobs.grad is not None
    assert torch.isfinite(torch.stack([loss.detach(), *metrics.values(), *logprobs.grad.flatten()])).all()


@pytest.mark.parametrize("kl_type", ["k1", "k3"])
def test_unbiased_estimates_of_the_divergence(kl_type: Any) -> None:
    """Averaged over the policy's own distribution, the estimate is the exact divergence."""
    policy = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.2, 0.6]], dtype=torch.float64)
    other = torch.tensor([[0.2, 0.2, 0.6], [0.5, 0.3, 0.2]], dtype=torch.float64)
    exact = (policy * (policy / other).log()).sum()
    estimate = (policy * kl_estimate(policy.log(), other.log(), kl_type)).sum()
    assert estimate.item() == pytest.approx(exact.item(), rel=1e-12)


def test_k2_has_the_gradient_of_the_divergence() -> None:
    logits = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64, requires_grad=True)
    other = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log()
    logprobs = logits.log_softmax(-1)
    (exact,) = torch.autograd.grad((logprobs.exp() * (logprobs - other)).sum(), logits, retain_graph=True)
    estimate = (logprobs.exp().detach() * kl_estimate(logprobs, other, "k2")).sum()
    (gradient,) = torch.autograd.grad(estimate, logits)
    torch.testing.assert_close(gradient, exact)


@pytest.mark.parametrize("sequence_level", [False, True])
@pytest.mark.parametrize("has_moved", [False, True])
def test_the_entropy_is_the_policys_whoever_drew_the_tokens(sequence_level: bool, has_moved: bool) -> None:
    """Each token as often as its generator draws it: the metric is then the policy's exact entropy."""
    policy, generator = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.2, 0.6])
    tokens = torch.tensor([0, 1, 2]).repeat_interleave((10 * generator).round().long())[:, None].expand(10, 2)
    batch: Batch = {
        "generation_logprobs": generator.log()[tokens],
        "prev_logprobs": (generator if has_moved else policy).log()[tokens],
        "advantages": torch.ones(10, 2),
        "token_mask": torch.tensor([0.0, 1.0]).expand(10, 2),  # behind a prompt
        "sample_mask": torch.ones(10),
    }
    loss = build(sequence_level_importance_ratios=sequence_level, token_level_loss=not sequence_level)
    _, metrics = loss(policy.log()[tokens], batch, normalizers(batch))
    assert metrics["approx_entropy"].item() == pytest.approx(-float((policy * policy.log()).sum()), rel=1e-6)


def test_required_keys_follow_the_configuration() -> None:
    plain = set(build().required)
    assert set(build(reference_policy_kl_penalty=0.1).required) - plain == {"reference_policy_logprobs"}
    kl = {"reference_policy_kl_penalty": 0.1}
    assert set(build(use_kl_in_reward=True, **kl).required) == plain
    weighted = {"reference_policy_logprobs", "generation_logprobs"}
    assert set(build(use_on_policy_kl_approximation=True, **kl).required) - plain == weighted
    assert set(build(use_on_policy_kl_approximation=True).required) == plain
    assert set(build(use_importance_sampling_correction=True).required) - plain == {"generation_logprobs"}
    assert set(build(entropy_coeff=0.1).required) - plain == {"entropy"}


@given(seed=SEEDS, sequence_level=st.booleans())
@settings(max_examples=20, deadline=None)
def test_a_forced_ratio_is_that_of_the_very_policy(seed: int, sequence_level: bool) -> None:
    """Whatever log-probabilities were computed before, loss and gradient are those of a policy that has not moved."""
    batch = random_batch(seed)
    logprobs = scores(batch["logits"], batch)[0].detach().requires_grad_()
    levels = {"sequence_level_importance_ratios": sequence_level, "token_level_loss": not sequence_level}
    forced, _ = build(force_on_policy_ratio=True, **levels)(logprobs, batch, normalizers(batch))
    still, _ = build(**levels)(logprobs, {**batch, "prev_logprobs": logprobs.detach()}, normalizers(batch))
    assert torch.equal(forced, still)
    assert torch.equal(*(torch.autograd.grad(loss, logprobs)[0] for loss in (forced, still)))


@given(seed=SEEDS, token_level=st.booleans(), corrected=st.booleans())
@settings(max_examples=20, deadline=None)
def test_reinforce_has_the_gradient_of_a_policy_that_has_not_moved(
    seed: int, token_level: bool, corrected: bool
) -> None:
    batch = random_batch(seed)
    logprobs = scores(batch["logits"], batch)[0].detach().requires_grad_()
    still = {**batch, "prev_logprobs": logprobs.detach()}
    keys = {"token_level_loss": token_level, "use_importance_sampling_correction": corrected}
    losses = [
        build(**{key: True}, **keys)(logprobs, still, normalizers(batch))[0]
        for key in ("disable_ppo_ratio", "force_on_policy_ratio")
    ]
    torch.testing.assert_close(*(torch.autograd.grad(loss, logprobs)[0] for loss in losses))


def test_reinforce_clips_nothing() -> None:
    """Where the ratio is far outside of the clip, the gradient is still that of the log-probability."""
    batch = random_batch(1)
    logprobs = scores(batch["logits"], batch)[0].detach().requires_grad_()
    away = {**batch, "prev_logprobs": logprobs.detach() - 3}
    loss, metrics = build(disable_ppo_ratio=True)(logprobs, away, normalizers(batch))
    assert not {"clip_fraction", "probs_ratio_clamped"} & metrics.keys()
    (gradient,) = torch.autograd.grad(loss, logprobs)
    expected = torch.zeros_like(gradient)
    for i, row in enumerate(counted(batch)):
        expected[i, row] = -batch["advantages"][i, row] / normalizers(batch).global_valid_tokens
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("kl_type", ["k1", "k3"])
def test_weighted_estimates_have_the_gradient_of_the_divergence(kl_type: Any) -> None:
    """On the policy's own samples the weights are 1 and bring the gradient of sampling in."""
    logits = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64, requires_grad=True)
    other = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log()
    logprobs = logits.log_softmax(-1)
    (exact,) = torch.autograd.grad((logprobs.exp() * (logprobs - other)).sum(), logits, retain_graph=True)
    weights = (logprobs - logprobs.detach()).exp()
    estimate = (logprobs.exp().detach() * kl_estimate(logprobs, other, kl_type, weights=weights)).sum()
    (gradient,) = torch.autograd.grad(estimate, logits)
    torch.testing.assert_close(gradient, exact)
