"""Direct Preference Optimization."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn.functional import logsigmoid

from nemo_rl_offload.losses.reduction import Normalizers, valid_tokens


@dataclass(frozen=True)
class PreferenceLoss:
    """``preference_loss_weight * DPO + sft_loss_weight * SFT``, each averaged over the pairs of the global batch.

    Rows alternate: chosen, rejected. With the reward ``r = beta (log p - log p_reference)`` of a response, DPO is
    ``-(1 - label_smoothing) log sigmoid(r_chosen - r_rejected) - label_smoothing log sigmoid(r_rejected - r_chosen)``,
    where ``beta`` is ``reference_policy_kl_penalty``. SFT is ``-log p`` of the chosen response. The log-probability
    of a response is the sum over its tokens, or with ``*_average_log_probs`` their mean. Sources: DPO,
    https://arxiv.org/abs/2305.18290; label smoothing: cDPO, https://ericmitchell.ai/cdpo.pdf.
    """

    reference_policy_kl_penalty: float
    label_smoothing: float
    preference_average_log_probs: bool
    sft_average_log_probs: bool
    preference_loss_weight: float
    sft_loss_weight: float

    rows_per_sample: ClassVar[int] = 2
    required: ClassVar[tuple[str, ...]] = ("token_mask", "sample_mask", "reference_policy_logprobs")

    def __call__(
        self, logprobs: Tensor, batch: Mapping[str, Tensor], norm: Normalizers
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the microbatch's share of loss and metrics, which add up over microbatches and ranks.

        Args:
            logprobs: of the current policy, [B,S] float, B even.
            batch: ``reference_policy_logprobs`` [B,S] float; ``token_mask`` [B,S] and ``sample_mask`` [B], 0 or 1. A
                pair counts where both of its rows do.
            norm: counts over the global batch.
        """
        mask = valid_tokens(batch)
        difference = logprobs - batch["reference_policy_logprobs"]
        rewards = self.reference_policy_kl_penalty * _per_row(difference, mask, self.preference_average_log_probs)
        chosen_N, rejected_N = rewards[0::2], rewards[1::2]
        margin_N = chosen_N - rejected_N
        preference_N = -(1 - self.label_smoothing) * logsigmoid(margin_N) - self.label_smoothing * logsigmoid(-margin_N)
        sft_N = -_per_row(logprobs, mask, self.sft_average_log_probs)[0::2]

        is_valid_N = batch["sample_mask"].view(-1, 2).bool().all(dim=1)
        num_pairs = norm.global_valid_seqs / 2

        def mean(values_N: Tensor) -> Tensor:
            return values_N.masked_fill(~is_valid_N, 0).sum() / num_pairs

        preference_loss, sft_loss = mean(preference_N), mean(sft_N)
        loss = self.preference_loss_weight * preference_loss + self.sft_loss_weight * sft_loss
        metrics = {
            "loss": loss,
            "preference_loss": preference_loss,
            "sft_loss": sft_loss,
            "accuracy": mean((margin_N > 0).to(margin_N.dtype)),
            "rewards_chosen_mean": mean(chosen_N),
            "rewards_rejected_mean": mean(rejected_N),
        }
        return loss, {name: metric.detach() for name, metric in metrics.items()}


def _per_row(values_BS: Tensor, mask_BS: Tensor, average: bool) -> Tensor:
    """Sum or mean over the valid tokens of each row, [B]."""
    total_B = values_BS.masked_fill(~mask_BS, 0).sum(dim=1)
    return total_B / mask_BS.sum(dim=1).clamp(min=1) if average else total_B
