"""What a policy generates for one prompt, and what it is told in between."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Response:
    """One sampled continuation of a prompt."""

    tokens: list[int]
    """Response tokens; an end token is included where one was sampled."""
    logprobs: list[float]
    """Log-probability of each token at the sampling temperature, before top-k and top-p."""
    finished: bool
    """Whether an end token was sampled, or a stop string completed, within the limit; of several turns, in the last."""
    observed: frozenset[int] = frozenset()
    """Positions of tokens that an environment wrote between turns; their log-probabilities are 0."""
    num_turns: int = 1
    versions: list[int] = field(default_factory=list)
    """By token, how often its engine's weights had been updated; nothing where no update comes in between."""
    num_drafted: int = 0
    num_accepted: int = 0
    """Tokens that speculative decoding proposed, and those of them that were taken."""
    routed_experts: NDArray[np.signedinteger[Any]] | None = field(default=None, compare=False)
    """[prompt and response, MoE layers, top-k]: the experts that generation's routers chose, without the last token,
    which an engine has only drawn; None where a backend does not say."""

    @property
    def num_generated(self) -> int:
        """Tokens that were sampled."""
        return len(self.tokens) - len(self.observed)

    def then(self, observation: list[int], response: "Response") -> "Response":
        """This response, what an environment answered, and the next turn's response, as one."""
        begin = len(self.tokens)
        end = begin + len(observation)
        return Response(
            self.tokens + observation + response.tokens,
            self.logprobs + [0.0] * len(observation) + response.logprobs,
            response.finished,
            self.observed | frozenset(range(begin, end)) | {end + place for place in response.observed},
            self.num_turns + response.num_turns,
            self.versions + response.versions[:1] * len(observation) + response.versions,
            self.num_drafted + response.num_drafted,
            self.num_accepted + response.num_accepted,
            _first_said(self.routed_experts, response.routed_experts),
        )


def _first_said(
    before: NDArray[np.signedinteger[Any]] | None, now: NDArray[np.signedinteger[Any]] | None
) -> NDArray[np.signedinteger[Any]] | None:
    """A later turn's choices, which begin with those for the earlier turns: of these, what drew their tokens."""
    if before is None or now is None:
        return now if before is None else before
    return np.concatenate([before, now[len(before) :]])
