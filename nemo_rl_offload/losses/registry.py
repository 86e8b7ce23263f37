"""Losses by name: workers receive a name and its configuration, never a pickled function."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor

from nemo_rl_offload.errors import ConfigError, nearest
from nemo_rl_offload.losses.nll import NegativeLogLikelihood
from nemo_rl_offload.losses.policy_gradient import ClippedPolicyGradient
from nemo_rl_offload.losses.reduction import Normalizers


class Loss(Protocol):
    """A loss over token log-probabilities; ``required`` names the batch keys that it reads."""

    @property
    def required(self) -> tuple[str, ...]: ...

    def __call__(
        self, logprobs: Tensor, batch: Mapping[str, Tensor], norm: Normalizers
    ) -> tuple[Tensor, dict[str, Tensor]]: ...


LOSSES: dict[str, Callable[..., Loss]] = {"clipped_pg": ClippedPolicyGradient, "nll": NegativeLogLikelihood}


def build_loss(name: str, config: Mapping[str, Any]) -> Loss:
    """Build the loss ``name``; ``config`` is ``loss_fn`` for ``clipped_pg`` and empty for ``nll``.

    Raises:
        ConfigError: no loss has this name.
    """
    if name not in LOSSES:
        raise ConfigError(f"Unknown loss '{name}'; one of {', '.join(LOSSES)}.{nearest(name, LOSSES)}")
    return LOSSES[name](**config)
