"""Negative log-likelihood: the supervised loss."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from nemo_rl_offload.losses.reduction import Normalizers, token_mean, valid_tokens


@dataclass(frozen=True)
class NegativeLogLikelihood:
    """``-log p(token)`` averaged over the valid tokens of the global batch."""

    rows_per_sample: ClassVar[int] = 1
    required: ClassVar[tuple[str, ...]] = ("token_mask", "sample_mask")

    def __call__(
        self, logprobs: Tensor, batch: Mapping[str, Tensor], norm: Normalizers
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the microbatch's share of the loss, in nats; ``logprobs`` [B,S], arguments as in
        ``ClippedPolicyGradient``."""
        loss = token_mean(-logprobs, valid_tokens(batch), norm)
        return loss, {"loss": loss.detach()}
