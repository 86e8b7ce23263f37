"""What a hybrid model predicts a further token with (MTP): several layers, where other models have one.

Megatron's own form is its `HybridModel`'s. In a `GPTModel` it builds one transformer layer; this module takes its
place, by the names of parameters that Bridge's table has.
"""

from collections.abc import Sequence
from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn


class HybridMTPLayers(MegatronModule):  # type: ignore[misc]
    """Layers one after the other, between the projection of two inputs to one and the last norm.

    All of them have the number of the prediction, by which routers add up what they measure.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_specs: Sequence[ModuleSpec],
        layer_number: int,
        pg_collection: ProcessGroupCollection,
        **how: Any,
    ) -> None:
        super().__init__(config=config)
        of_all = {"config": config, "layer_number": layer_number, "pg_collection": pg_collection, **how}
        self.layers: Any = nn.ModuleList([build_module(spec, **of_all) for spec in layer_specs])

    def forward(self, hidden_states: Tensor, **inputs: Any) -> tuple[Tensor, None]:
        """[sequence, batch, hidden] to the same, called as a transformer layer is."""
        for layer in self.layers:
            hidden_states, _ = layer(hidden_states=hidden_states, **inputs)
        return hidden_states, None

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> ShardedStateDict:
        """Each layer by its own name."""
        sharded: ShardedStateDict = {}
        for number, layer in enumerate(self.layers):
            sharded |= layer.sharded_state_dict(f"{prefix}layers.{number}.", sharded_offsets, metadata)
        return sharded
