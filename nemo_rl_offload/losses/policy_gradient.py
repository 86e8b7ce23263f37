"""Clipped policy-gradient loss with a KL penalty, as GRPO uses it."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_rl_offload.losses.reduction import Normalizers, sequence_mean, token_mean, valid_tokens

# NeMo-RL's defaults for the KL estimate. Here the importance ratio is clamped too: an infinite ratio that the
# clip discards would still give NaN gradients, from `0 * inf`.
MAX_LOG_RATIO = 20.0
MAX_KL = 10.0


def kl_k3(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Estimate KL(policy || reference) per token, from samples of the policy: ``exp(d) - 1 - d``, at least 0.

    ``d = reference - policy`` is clamped to +-20 and the estimate to at most 10. Any equal shapes, float.
    Source: k3 in Schulman, "Approximating KL Divergence", 2020, http://joschu.net/blog/kl-approx.html.
    """
    difference = (reference_logprobs - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (difference.expm1() - difference).clamp(max=MAX_KL)


@dataclass(frozen=True)
class ClippedPolicyGradient:
    """``-min(r A, clip(r, 1 - ratio_clip_min, 1 + ratio_clip_max) A) + penalty * KL(policy || reference)``.

    ``r = exp(logprobs - prev_logprobs)``, with the logarithm clamped to +-20. The average goes over tokens
    (``token_level_loss``) or over the sequences' token means. Sources: PPO, https://arxiv.org/abs/1707.06347;
    GRPO, https://arxiv.org/abs/2402.03300; separate clip bounds: DAPO, https://arxiv.org/abs/2503.14476.
    """

    ratio_clip_min: float
    ratio_clip_max: float
    reference_policy_kl_penalty: float
    token_level_loss: bool

    @property
    def required(self) -> tuple[str, ...]:
        keys = ("prev_logprobs", "advantages", "token_mask", "sample_mask")
        return (*keys, "reference_policy_logprobs") if self.reference_policy_kl_penalty else keys

    def __call__(
        self, logprobs: Tensor, batch: Mapping[str, Tensor], norm: Normalizers
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the microbatch's share of loss and metrics, which add up over microbatches and ranks.

        Args:
            logprobs: of the current policy, [B,S] float; ``logprobs[:, t]`` is that of ``input_ids[:, t]``.
            batch: ``prev_logprobs``, ``advantages`` and, with a KL penalty, ``reference_policy_logprobs``,
                [B,S] float; ``token_mask`` [B,S] and ``sample_mask`` [B], 0 or 1.
            norm: counts over the global batch.
        """
        mask = valid_tokens(batch)
        logprobs = logprobs.masked_fill(~mask, 0)  # padding may hold -inf, and `-inf * 0` is NaN
        previous = batch["prev_logprobs"].masked_fill(~mask, 0)
        advantages = batch["advantages"]
        mean = token_mean if self.token_level_loss else sequence_mean

        ratios = (logprobs - previous).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        clipped_ratios = ratios.clamp(1 - self.ratio_clip_min, 1 + self.ratio_clip_max)
        loss = mean(torch.maximum(-advantages * ratios, -advantages * clipped_ratios), mask, norm)
        metrics: dict[str, Tensor] = {}
        if self.reference_policy_kl_penalty:
            reference = batch["reference_policy_logprobs"].masked_fill(~mask, 0)
            kl = mean(kl_k3(logprobs, reference), mask, norm)
            loss = loss + self.reference_policy_kl_penalty * kl
            metrics["kl_penalty"] = kl.detach()

        with torch.no_grad():
            clip_binds = -advantages * clipped_ratios > -advantages * ratios
            metrics |= {
                "loss": loss.detach(),
                "probs_ratio": token_mean(ratios, mask, norm),
                "probs_ratio_clamped": token_mean(clipped_ratios, mask, norm),
                "clip_fraction": token_mean(clip_binds.to(ratios.dtype), mask, norm),
                "approx_kl": token_mean(kl_k3(previous, logprobs), mask, norm),
                "approx_entropy": token_mean(-ratios * logprobs, mask, norm),
            }
        return loss, metrics
