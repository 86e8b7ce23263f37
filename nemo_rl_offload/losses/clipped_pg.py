"""Clipped policy-gradient losses with a KL penalty: PPO and GRPO, and DAPO, GSPO and CISPO as their variants."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from nemo_rl_offload.losses.reduction import Normalizers, sequence_mean, token_mean, valid_tokens

# An infinite ratio that the clip discards would still give NaN gradients, from `0 * inf`.
MAX_LOG_RATIO = 20.0
MAX_EXPONENT = 80.0
"""Likewise of an estimate that is clamped, for far more than any clamp; float32 overflows above 88.7."""

KLType = Literal["k1", "k2", "k3"]
TruncationType = Literal["tis", "icepop", "seq-mask-tis"]


def kl_estimate(
    logprobs: Tensor,
    reference_logprobs: Tensor,
    kl_type: KLType,
    *,
    input_clamp: float | None = 20.0,
    output_clamp: float | None = 10.0,
    weights: Tensor | None = None,
) -> Tensor:
    """Estimate KL(policy || reference) per token, from samples of the policy; [...] alike, float, and so is the result.

    With ``d = log p_reference - log p_policy`` of the sampled token, clamped to +-``input_clamp``:

    - k1 = ``-d``: unbiased, of either sign. Useless as a loss without ``weights``: its gradient is 0 on average.
    - k2 = ``d^2 / 2``: biased, at least 0.
    - k3 = ``exp(d) - 1 - d``: unbiased, at least 0.

    The estimate, times ``weights`` (of samples that another policy drew; fixed where the clamp binds), is clamped to
    +-``output_clamp``; None: no clamp. Source: Schulman, "Approximating KL Divergence", 2020,
    http://joschu.net/blog/kl-approx.html.
    """
    difference = reference_logprobs - logprobs
    if input_clamp is not None:
        clamped = difference.clamp(-input_clamp, input_clamp)
        if weights is not None:
            weights = torch.where(clamped == difference, weights, weights.detach())
        difference = clamped
    if kl_type == "k1":
        estimate = -difference
    elif kl_type == "k2":
        estimate = difference.square() / 2
    else:
        exponent = difference if output_clamp is None else difference.clamp(max=MAX_EXPONENT)
        estimate = exponent.expm1() - exponent
    if weights is not None:
        estimate = weights * estimate
    return estimate if output_clamp is None else estimate.clamp(-output_clamp, output_clamp)


def _over(sampled_from: Tensor, logprobs: Tensor, mask: Tensor) -> Tensor:
    """The weight of each token, drawn with the log-probabilities ``sampled_from``, in an average over the policy."""
    return (logprobs - sampled_from.masked_fill(~mask, 0)).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


@dataclass(frozen=True)
class ClippedPolicyGradient:
    """``w max(-r A, -clip(r, 1 - ratio_clip_min, 1 + ratio_clip_max) A) + penalty * KL - entropy_coeff * entropy``.

    - ``r = exp(logprobs - prev_logprobs)``, with the logarithm clamped to +-20. With
      ``sequence_level_importance_ratios`` the logarithm is averaged over the response first.
    - ``force_on_policy_ratio`` takes the current policy for the previous one: ``r`` is 1, and has its gradient.
    - ``disable_ppo_ratio`` takes ``-A logprobs`` instead, without a ratio (REINFORCE).
    - ``ratio_clip_c`` bounds the loss by ``-c A`` where ``A < 0`` (dual clip).
    - ``use_cispo`` takes ``-clip(r) A logprobs`` instead, without a gradient through ``clip(r)``.
    - ``w`` is 1, or with ``use_importance_sampling_correction`` ``exp(prev_logprobs - generation_logprobs)``, of the
      whole response with ``sequence_level_importance_ratios``. ``truncated_importance_sampling_ratio_min`` and
      ``truncated_importance_sampling_ratio`` bound it: type ``tis`` or None cuts it there, ``icepop`` takes 0 for one
      that is beyond, and ``seq-mask-tis`` 0 for all of a response whose geometric mean is.
    - KL is ``kl_estimate`` against the reference policy; with ``use_on_policy_kl_approximation`` each token's counts
      ``exp(logprobs - generation_logprobs)`` times. With ``use_kl_in_reward`` the advantages have it instead.

    Averages go over tokens (``token_level_loss``) or over the sequences' token means. Sources: PPO,
    https://arxiv.org/abs/1707.06347; dual clip, https://arxiv.org/abs/1912.09729; GRPO,
    https://arxiv.org/abs/2402.03300; separate clip bounds: DAPO, https://arxiv.org/abs/2503.14476; GSPO,
    https://arxiv.org/abs/2507.18071; CISPO, https://arxiv.org/abs/2506.13585; truncated importance sampling,
    https://fengyao.notion.site/off-policy-rl; RLOO, https://arxiv.org/abs/2402.14740; weighted KL,
    https://arxiv.org/abs/2506.09477.
    """

    ratio_clip_min: float
    ratio_clip_max: float
    ratio_clip_c: float | None
    force_on_policy_ratio: bool
    disable_ppo_ratio: bool
    use_cispo: bool
    sequence_level_importance_ratios: bool
    use_importance_sampling_correction: bool
    truncated_importance_sampling_type: TruncationType | None
    truncated_importance_sampling_ratio: float | None
    truncated_importance_sampling_ratio_min: float | None
    reference_policy_kl_penalty: float
    reference_policy_kl_type: KLType
    kl_input_clamp_value: float | None
    kl_output_clamp_value: float | None
    use_kl_in_reward: bool
    use_on_policy_kl_approximation: bool
    entropy_coeff: float
    token_level_loss: bool

    rows_per_sample: ClassVar[int] = 1

    @property
    def _has_kl(self) -> bool:
        return self.reference_policy_kl_penalty > 0 and not self.use_kl_in_reward

    @property
    def required(self) -> tuple[str, ...]:
        optional = {
            "reference_policy_logprobs": self._has_kl,
            "generation_logprobs": self.use_importance_sampling_correction
            or (self._has_kl and self.use_on_policy_kl_approximation),
            "entropy": self.entropy_coeff > 0,
        }
        keys = ("prev_logprobs", "advantages", "token_mask", "sample_mask")
        return keys + tuple(key for key, is_needed in optional.items() if is_needed)

    def __call__(
        self, logprobs: Tensor, batch: Mapping[str, Tensor], norm: Normalizers
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the microbatch's share of loss and metrics, which add up over microbatches and ranks.

        Args:
            logprobs: of the current policy, [B,S] float; ``logprobs[:, t]`` is that of ``input_ids[:, t]``.
            batch: ``prev_logprobs``, ``advantages`` and what else ``required`` names, [B,S] float; ``token_mask``
                [B,S] and ``sample_mask`` [B], 0 or 1.
            norm: counts over the global batch.
        """
        mask = valid_tokens(batch)
        logprobs = logprobs.masked_fill(~mask, 0)  # padding may hold -inf, and `-inf * 0` is NaN
        previous = logprobs.detach() if self.force_on_policy_ratio else batch["prev_logprobs"].masked_fill(~mask, 0)
        advantages = batch["advantages"].masked_fill(~mask, 0)
        mean = token_mean if self.token_level_loss else sequence_mean

        ratios = self._ratios(logprobs - previous, mask)
        clipped_ratios = ratios.clamp(1 - self.ratio_clip_min, 1 + self.ratio_clip_max)
        per_token = self._clipped_loss(logprobs, advantages, ratios, clipped_ratios)
        metrics: dict[str, Tensor] = {}
        if self.use_importance_sampling_correction:
            weights, is_beyond = self._sampling_weights(previous, batch["generation_logprobs"], mask)
            per_token = weights * per_token
            metrics["sampling_importance_ratio"] = token_mean(weights, mask, norm)
            if is_beyond is not None:
                metrics["is_oob_ratio"] = token_mean(is_beyond.to(weights.dtype), mask, norm)
        loss = mean(per_token, mask, norm)
        if self._has_kl:
            kl = mean(self._kl(logprobs, batch, mask), mask, norm)
            loss = loss + self.reference_policy_kl_penalty * kl
            metrics["kl_penalty"] = kl
        if self.entropy_coeff:
            entropy = mean(batch["entropy"], mask, norm)
            loss = loss - self.entropy_coeff * entropy
            metrics["entropy"] = entropy

        with torch.no_grad():
            sampled_from = batch.get("generation_logprobs", previous)
            if not self.disable_ppo_ratio:
                metrics["probs_ratio_clamped"] = token_mean(clipped_ratios, mask, norm)
                clip_binds = self._clip_binds(advantages, ratios, clipped_ratios)
                metrics["clip_fraction"] = token_mean(clip_binds.to(ratios.dtype), mask, norm)
            metrics |= {
                "loss": loss,
                "probs_ratio": token_mean(ratios, mask, norm),
                "approx_kl": token_mean(kl_estimate(previous, logprobs, "k3"), mask, norm),
                "approx_entropy": token_mean(-_over(sampled_from, logprobs, mask) * logprobs, mask, norm),
            }
        return loss, {name: metric.detach() for name, metric in metrics.items()}

    def _ratios(self, log_ratios_BS: Tensor, mask_BS: Tensor) -> Tensor:
        if self.sequence_level_importance_ratios:
            mean_B = log_ratios_BS.sum(dim=1) / mask_BS.sum(dim=1).clamp(min=1)
            log_ratios_BS = mean_B[:, None].expand_as(log_ratios_BS)
        return log_ratios_BS.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()

    def _kl(self, logprobs_BS: Tensor, batch: Mapping[str, Tensor], mask_BS: Tensor) -> Tensor:
        reference_BS = batch["reference_policy_logprobs"].masked_fill(~mask_BS, 0)
        weights_BS = None
        if self.use_on_policy_kl_approximation:
            weights_BS = _over(batch["generation_logprobs"], logprobs_BS, mask_BS)
        return kl_estimate(
            logprobs_BS,
            reference_BS,
            self.reference_policy_kl_type,
            input_clamp=self.kl_input_clamp_value,
            output_clamp=self.kl_output_clamp_value,
            weights=weights_BS,
        )

    def _clipped_loss(
        self, logprobs_BS: Tensor, advantages_BS: Tensor, ratios_BS: Tensor, clipped_ratios_BS: Tensor
    ) -> Tensor:
        if self.disable_ppo_ratio:
            return -advantages_BS * logprobs_BS
        if self.use_cispo:
            return -clipped_ratios_BS.detach() * advantages_BS * logprobs_BS
        loss_BS = torch.maximum(-advantages_BS * ratios_BS, -advantages_BS * clipped_ratios_BS)
        if self.ratio_clip_c is None:
            return loss_BS
        return torch.where(advantages_BS < 0, torch.minimum(loss_BS, -advantages_BS * self.ratio_clip_c), loss_BS)

    def _clip_binds(self, advantages_BS: Tensor, ratios_BS: Tensor, clipped_ratios_BS: Tensor) -> Tensor:
        """Bool: where another value takes the place of the ratio."""
        if self.use_cispo:
            return (clipped_ratios_BS != ratios_BS) & (advantages_BS != 0)
        binds_BS = -advantages_BS * clipped_ratios_BS > -advantages_BS * ratios_BS
        if self.ratio_clip_c is None:
            return binds_BS
        return binds_BS | ((advantages_BS < 0) & (ratios_BS > self.ratio_clip_c))

    def _sampling_weights(
        self, previous_BS: Tensor, generation_BS: Tensor, mask_BS: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """The weights, and which tokens are beyond the bounds where there are any."""
        difference_BS = previous_BS - generation_BS.masked_fill(~mask_BS, 0)
        mean_B = difference_BS.sum(dim=1) / mask_BS.sum(dim=1).clamp(min=1)
        if self.sequence_level_importance_ratios:
            difference_BS = difference_BS.sum(dim=1, keepdim=True).expand_as(difference_BS)
        weights_BS = difference_BS.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        most, least = self.truncated_importance_sampling_ratio, self.truncated_importance_sampling_ratio_min
        if most is None and least is None:
            return weights_BS, None
        if self.truncated_importance_sampling_type == "seq-mask-tis":
            bounded_BS = mean_B.exp()[:, None].expand_as(weights_BS)
        else:
            bounded_BS = weights_BS
        is_beyond_BS = torch.zeros_like(mask_BS)
        if most is not None:
            is_beyond_BS = is_beyond_BS | (bounded_BS > most)
        if least is not None:
            is_beyond_BS = is_beyond_BS | (bounded_BS < least)
        if self.truncated_importance_sampling_type in ("icepop", "seq-mask-tis"):
            return weights_BS.masked_fill(is_beyond_BS, 0), is_beyond_BS
        return weights_BS.clamp(least, most), is_beyond_BS
