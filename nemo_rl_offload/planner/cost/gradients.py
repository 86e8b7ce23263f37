"""Gradients that are on their way while a layer's backward runs: what its peak has beside saved activations.

Backward begins with a layer's MLP, when nothing that the layer saved is freed yet. A module there holds the gradients
of its output, of its input and of its weights: without `gradient_accumulation_fusion` the last is a tensor of its own
until it is added to the sum. What the modules after it had saved is freed by then.
"""

from collections.abc import Iterator
from typing import NamedTuple

from nemo_rl_offload.planner.cost.recurrent import core_bytes, gradients_of_core, mixer_of
from nemo_rl_offload.planner.cost.storages import LayerContext
from nemo_rl_offload.specs.model_shape import LayerKind


class _Step(NamedTuple):
    """A module in backward; bytes."""

    gradients: int
    freed: int
    """What it saved, and lets go when it is done."""


def backward_bytes(context: LayerContext, kind: LayerKind, *, is_frozen: bool = False) -> int:
    """The most that gradients take in a layer's backward over what of the layer is freed by then, in bytes.

    Frozen weights have none.
    """
    freed, most = 0, 0
    steps = _steps_of_mixer(context, kind, is_frozen) if kind.mlp is None else _steps_of_mlp(context, kind, is_frozen)
    for step in steps:
        most = max(most, step.gradients - freed)
        freed += step.freed
    return context.hidden_bytes + most  # beside the residual's


def _steps_of_mlp(context: LayerContext, kind: LayerKind, is_frozen: bool) -> Iterator[_Step]:
    shape, layout, size = context.shape, context.layout, context.numbers.element_bytes
    tokens, width, num_local = context.tokens.count, shape.ffn_hidden_size // layout.tensor, 1
    read, num_parts = shape.hidden_size, 2 if shape.gated_mlp else 1
    if kind.mlp == "experts":
        assert shape.experts is not None
        tokens, width = context.expert_tokens, shape.experts.ffn_hidden_size // layout.expert_tensor
        num_local, read = shape.experts.num_experts // layout.expert, shape.experts.latent_size or shape.hidden_size
    outer, inner = tokens * read, tokens * width
    weights = 0 if is_frozen else num_local * width * read
    yield _Step((outer + inner + weights) * size, context.numbers.linear_input_bytes(inner))
    yield _Step((num_parts + 1) * inner * size, num_parts * inner * size)
    yield _Step((num_parts * inner + outer + num_parts * weights) * size, 0)


def _steps_of_mixer(context: LayerContext, kind: LayerKind, is_frozen: bool) -> Iterator[_Step]:
    """Of a layer without an MLP: the last projection, what is between the two, the first one."""
    shape, count, size = context.shape, context.tokens.count, context.numbers.element_bytes
    if kind.mixer == "attention":
        inner, projected = context.heads * shape.value_head_dim, context.projected_width
        between, freed = count * (inner + projected) * size, 0
    else:
        mixer = mixer_of(context, kind)
        inner, projected = mixer.gate, mixer.projected
        between, freed = gradients_of_core(context, kind), core_bytes(context, kind)
    outer, weights = count * shape.hidden_size, 0 if is_frozen else shape.hidden_size
    yield _Step((outer + count * inner + weights * inner) * size, count * inner * size)
    yield _Step(between, freed)
    yield _Step((outer + count * projected + weights * projected) * size, 0)
