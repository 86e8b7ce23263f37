"""A linear layer that every tensor-parallel rank has as a whole, in plain torch.

Megatron takes Transformer Engine's for the projections around experts that compute in fewer elements
(`moe_latent_size`), by its name in the module of the MoE layer, and builds none without it. `whole_linears` puts this
one there while a layer is built.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.transformer.moe import moe_layer
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor


class WholeLinear(torch.nn.Module):
    """Input [..., in], output ([..., out], None). Called with the arguments of Transformer Engine's by Megatron."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Callable[[Tensor], object],
        bias: bool,
        **_of_transformer_engine: object,
    ) -> None:
        assert not bias, "no model has one"
        super().__init__()
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype, device=device))
        if config.perform_initialization:
            init_method(self.weight)
        # Each rank has the gradient of its own part of a sequence.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return F.linear(x, self.weight), None

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, object] | None = None,
    ) -> ShardedStateDict:
        """The weight, once for all tensor-parallel ranks."""
        return make_sharded_tensors_for_checkpoint(self.state_dict(keep_vars=True), prefix, {}, sharded_offsets)


@contextmanager
def whole_linears() -> Iterator[None]:
    """Let MoE layers be built with them."""
    before = moe_layer.HAVE_TE, moe_layer.TELinear
    moe_layer.HAVE_TE, moe_layer.TELinear = True, WholeLinear
    try:
        yield
    finally:
        moe_layer.HAVE_TE, moe_layer.TELinear = before
