"""How vLLM's choices of experts become those of a response."""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from nemo_rl_offload.config.rules.rule import read_shape
from nemo_rl_offload.config.schema import PolicyConfig


@dataclass(frozen=True)
class RoutesOfModel:
    """How vLLM's choices of experts become those of a response."""

    layers: tuple[int, ...]
    """With experts, of all layers, of which vLLM tells."""
    dtype: type[np.signedinteger[Any]]
    """The smallest that has the experts' numbers and `NO_ROUTE`."""

    @classmethod
    def of(cls, config: PolicyConfig) -> Self:
        """Of a policy's model."""
        shape = read_shape(config["model_name"])
        assert shape.experts is not None, "checked with the configuration"
        layers = tuple(layer for layer, has_experts in enumerate(shape.layers_with_experts) if has_experts)
        return cls(layers, np.int8 if shape.experts.num_experts <= 1 + np.iinfo(np.int8).max else np.int16)

    def of_response(self, routes_TLK: NDArray[Any] | None, num_tokens: int) -> NDArray[Any] | None:
        """Of prompt and response, whose last token has no choice; None where vLLM does not have that many."""
        if routes_TLK is None or len(routes_TLK) != num_tokens - 1:
            return None
        return routes_TLK[:, self.layers].astype(self.dtype)
