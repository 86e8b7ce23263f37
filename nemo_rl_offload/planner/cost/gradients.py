"""Gradients that are on their way while a layer's backward runs: what its peak has beside saved activations.

Backward begins with a layer's MLP, when nothing that the layer saved is freed yet. A module there holds the gradients
of its output, of its input and of its weights: without `gradient_accumulation_fusion` the last is a tensor of its own
until it is added to the sum. What the modules after it had saved is freed by then.
"""

from collections.abc import Iterator
from typing import NamedTuple

from nemo_rl_offload.planner.cost.activations import LayerContext


class _Step(NamedTuple):
    """A module in backward; bytes."""

    gradients: int
    freed: int
    """What it saved, and lets go when it is done."""


def backward_bytes(context: LayerContext, has_experts: bool, *, is_frozen: bool = False) -> int:
    """The most that gradients take in a layer's backward over what of the layer is freed by then, in bytes.

    Frozen weights have none.
    """
    freed, most = 0, 0
    for step in _steps(context, has_experts, is_frozen):
        most = max(most, step.gradients - freed)
        freed += step.freed
    return context.hidden_bytes + most  # beside the residual's


def _steps(context: LayerContext, has_experts: bool, is_frozen: bool) -> Iterator[_Step]:
    shape, layout, size = context.shape, context.layout, context.numbers.element_bytes
    tokens, width, num_local = context.tokens.count, shape.ffn_hidden_size // layout.tensor, 1
    if has_experts:
        assert shape.experts is not None
        tokens, width = context.expert_tokens, shape.experts.ffn_hidden_size // layout.expert_tensor
        num_local = shape.experts.num_experts // layout.expert
    outer, inner = tokens * shape.hidden_size, tokens * width
    weights = 0 if is_frozen else num_local * width * shape.hidden_size
    yield _Step((outer + inner + weights) * size, context.numbers.linear_input_bytes(inner))
    yield _Step(3 * inner * size, 2 * inner * size)
    yield _Step((2 * inner + outer + 2 * weights) * size, 0)
