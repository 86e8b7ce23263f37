"""What a policy generates for one prompt."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Response:
    """One sampled continuation of a prompt."""

    tokens: list[int]
    """Response tokens; the end token is included where it was sampled."""
    logprobs: list[float]
    """Log-probability of each token at the sampling temperature, before top-k and top-p."""
    finished: bool
    """Whether the end token was sampled within the limit."""
