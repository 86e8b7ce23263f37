"""Losses by name: workers receive a name and its configuration, never a pickled function."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Protocol

from torch import Tensor

from nemo_rl_offload.config.plugins import import_object
from nemo_rl_offload.errors import ConfigError, nearest
from nemo_rl_offload.losses.clipped_pg import ClippedPolicyGradient
from nemo_rl_offload.losses.distillation import DistillationLoss
from nemo_rl_offload.losses.dpo import PreferenceLoss
from nemo_rl_offload.losses.nll import NegativeLogLikelihood
from nemo_rl_offload.losses.reduction import Normalizers


class Loss(Protocol):
    """A loss over token log-probabilities.

    ``required`` names the batch keys that it reads. Two of them come from the current policy's logits, with
    gradients, and whoever has those adds them: ``entropy`` [B,S], and ``topk_logprobs`` [B,S,K], the log-probabilities
    of the tokens ``teacher_topk_indices`` [B,S,K]. ``rows_per_sample`` rows of a batch make one sample and must stay
    in one microbatch.
    """

    @property
    def rows_per_sample(self) -> int: ...

    @property
    def required(self) -> tuple[str, ...]: ...

    def __call__(
        self, logprobs: Tensor, batch: Mapping[str, Tensor], norm: Normalizers
    ) -> tuple[Tensor, dict[str, Tensor]]: ...


type LossType = type[ClippedPolicyGradient | NegativeLogLikelihood | PreferenceLoss | DistillationLoss]
LOSSES: dict[str, LossType] = {
    "clipped_pg": ClippedPolicyGradient,
    "nll": NegativeLogLikelihood,
    "dpo": PreferenceLoss,
    "distillation": DistillationLoss,
}


def build_loss(name: str, config: Mapping[str, object]) -> Loss:
    """Build the loss ``name``, one of `LOSSES` or ``module:Class``, which takes its own keys from ``config``.

    Raises:
        ConfigError: no loss has this name, or its module does not import.
    """
    loss = _loss_type(name)
    build: Callable[..., Loss] = loss
    return build(**{field.name: config[field.name] for field in fields(loss)})


def rows_per_sample(name: str) -> int:
    """Return how many rows of a batch the loss ``name`` takes for one sample."""
    return _loss_type(name).rows_per_sample


def _loss_type(name: str) -> LossType:
    if ":" in name:
        return import_object(name)  # type: ignore[no-any-return]
    if name not in LOSSES:
        raise ConfigError(f"Unknown loss '{name}'; one of {', '.join(LOSSES)}.{nearest(name, LOSSES)}")
    return LOSSES[name]
