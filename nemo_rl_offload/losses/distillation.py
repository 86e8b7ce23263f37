"""Divergence of a student from a teacher of whom only the most likely tokens are known."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from nemo_rl_offload.losses.reduction import Normalizers, token_mean, valid_tokens

LOG_NEARLY_ZERO = -100.0
"""The teacher's log-probability outside its top k where ``zero_outside_topk`` takes it for none; NeMo-RL's value."""


@dataclass(frozen=True)
class DistillationLoss:
    """KL divergence over the teacher's top-k tokens at each position, averaged over the tokens of the global batch.

    ``kl_type``: ``forward`` is KL(teacher || student), ``reverse`` is KL(student || teacher), ``mixed`` is
    ``mixed_kl_weight * forward + (1 - mixed_kl_weight) * reverse``. The teacher's distribution is its top k made to add
    up to 1. So is the student's, unless ``zero_outside_topk``: then the student keeps its whole vocabulary, of which
    the teacher gives nearly nothing (``exp(-100)``) to the rest, and reverse KL punishes what the student puts there.
    Source of the two directions: https://arxiv.org/abs/2306.13649.
    """

    kl_type: Literal["forward", "reverse", "mixed"]
    mixed_kl_weight: float
    zero_outside_topk: bool

    rows_per_sample: ClassVar[int] = 1

    @property
    def required(self) -> tuple[str, ...]:
        keys = ("token_mask", "sample_mask", "teacher_topk_logits", "topk_logprobs")
        return (*keys, "entropy") if self.zero_outside_topk and self._forward_weight < 1 else keys

    @property
    def _forward_weight(self) -> float:
        return {"forward": 1.0, "reverse": 0.0, "mixed": self.mixed_kl_weight}[self.kl_type]

    def __call__(
        self, logprobs: Tensor, batch: Mapping[str, Tensor], norm: Normalizers
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the microbatch's share of the loss, in nats.

        Args:
            logprobs: not read; the log-probabilities that count are in ``batch``.
            batch: ``teacher_topk_logits`` and ``topk_logprobs`` (the student's, over its whole vocabulary, at the same
                tokens), [B,S,K] float; ``entropy`` of the student [B,S], where ``required`` names it; ``token_mask``
                [B,S] and ``sample_mask`` [B], 0 or 1.
            norm: counts over the global batch.
        """
        mask = valid_tokens(batch)
        teacher = batch["teacher_topk_logits"].float().log_softmax(dim=-1)
        student = batch["topk_logprobs"]
        teacher = teacher.to(student.dtype)
        if not self.zero_outside_topk:
            student = student.log_softmax(dim=-1)
        weight = self._forward_weight
        kl = student.new_zeros(mask.shape)
        if weight > 0:
            kl = kl + weight * (teacher.exp() * (teacher - student)).sum(dim=-1)
        if weight < 1:
            kl = kl + (1 - weight) * self._reverse(student, teacher, batch)
        loss = token_mean(kl, mask, norm)
        return loss, {"loss": loss.detach()}

    def _reverse(self, student: Tensor, teacher: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """KL(student || teacher) at every position, [B,S]; the student's rest is what entropy has beyond the top k."""
        probs = student.exp()
        if not self.zero_outside_topk:
            return (probs * (student - teacher)).sum(dim=-1)
        return -batch["entropy"] - (probs * teacher).sum(dim=-1) - LOG_NEARLY_ZERO * (1 - probs.sum(dim=-1))
