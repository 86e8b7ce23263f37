"""What adapters make on the way of a layer's forward, beside what the layer saves.

At the largest moment a linear with an adapter has four tensors of its output's size: its own, the adapter's, and their
sum, which is saved; with an adapter for each part, the parts before they are put together as well. What the layer saves
after that linear is not there yet. Without adapters a linear's output is the only one, and backward takes more.
"""

from functools import cache

from nemo_rl_offload.planner.cost.storages import LayerContext
from nemo_rl_offload.specs.lora import Adapted, Adapters, adapted
from nemo_rl_offload.specs.model_shape import LayerKind, ModelShape


def adapters_bytes(context: LayerContext, kind: LayerKind, adapters: Adapters | None, *, saves: bool) -> int:
    """The most that adapters of a layer take, in bytes: where it `saves`, over what it has saved in the end; else over
    what its forward takes without them."""
    if adapters is None:
        return 0
    found = _of_kind(context.shape, kind, adapters)
    return max((_made_by(context, one, saves) for one in found), default=0)


@cache  # a search for a layout asks thousands of times
def _of_kind(shape: ModelShape, kind: LayerKind, adapters: Adapters) -> tuple[Adapted, ...]:
    layer = shape.all_kinds.index(kind)
    found = adapted(shape, adapters.targets, adapters.excluded)
    return tuple(one for one in found if one.linear.layer == layer)


def _made_by(context: LayerContext, one: Adapted, saves: bool) -> int:
    linear, layout, size = one.linear, context.layout, context.numbers.element_bytes
    tensor = layout.expert_tensor if linear.is_of_experts else layout.tensor
    tokens = context.expert_tokens if linear.is_of_experts else context.tokens.count
    width = sum(linear.outputs) // (1 if linear.splits_inputs else tensor)
    output_bytes = tokens * width * size
    # The input of the second linear of an MLP, as wide as one of the first one's parts, is saved behind that.
    saved_later = output_bytes // len(linear.outputs) if saves and linear.name == "linear_fc1" else 0
    return (3 if one.parts else 2) * output_bytes - saved_later
