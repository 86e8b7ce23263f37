"""Megatron's dense MLP with the regions `mlp_fc1` and `mlp_act`, which Megatron cannot offload at all.

In plain torch layers the norm before it is a region of its own inside `linear_fc1` (`torch_layers`), and so is the
linear part. In Transformer Engine's layers norm and linear are one kernel, which saves the norm's input and its output;
both belong to `mlp_fc1` there.
"""

from collections.abc import Sequence

import torch.nn.functional as F
from megatron.core.fusions.fused_bias_geglu import bias_geglu_impl
from megatron.core.fusions.fused_bias_gelu import bias_gelu_impl
from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from nemo_rl_offload.megatron.offload_interface import offload_region


class DenseMLP(MLP):  # type: ignore[misc]
    """[sequence, batch, hidden] in and out; what it computes is Megatron's."""

    def forward(
        self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **_unused: object
    ) -> tuple[Tensor, Tensor | None]:
        assert per_token_scale is None, "a scale per token belongs to experts"
        x, bias = self._first_linear(hidden_states)
        act = offload_region(self.config, x, "mlp_act", self.training)
        with act as x:
            y = self._activate(x, bias)
        output, output_bias = self.linear_fc2(y)
        return act.group_offload(output), output_bias

    def _first_linear(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """`linear_fc1` opens its own regions."""
        return self.linear_fc1(x)  # type: ignore[no-any-return]

    def _activate(self, x: Tensor, bias: Tensor | None) -> Tensor:
        config, activation = self.config, self.activation_func
        gated = config.gated_linear_unit
        if config.bias_activation_fusion and not config.use_te_activation_func:
            if activation == F.silu and gated:
                return bias_swiglu_impl(x, bias, config.activation_func_fp8_input_store)  # type: ignore[no-any-return]
            if activation == F.gelu and (gated or bias is not None):
                return (bias_geglu_impl if gated else bias_gelu_impl)(x, bias)  # type: ignore[no-any-return]
        if bias is not None:
            x = x + bias
        if config.use_te_activation_func or not gated:
            return activation(x)  # type: ignore[no-any-return]
        gate, up = x.chunk(2, dim=-1)
        if (limit := config.activation_func_clamp_value) is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        if config.glu_linear_offset:
            up = up + config.glu_linear_offset
        return activation(gate) * up  # type: ignore[no-any-return]


class FusedNormDenseMLP(DenseMLP):
    """The same where norm and first linear are one kernel."""

    norm_is_fused = True

    def _first_linear(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        region = offload_region(self.config, x, "mlp_fc1", self.training)
        with region as x:
            output, bias = self.linear_fc1(x)
        return region.group_offload(output), bias


def open_dense_mlps(chunks: Sequence[nn.Module]) -> list[nn.Module]:
    """Give the dense MLPs of Transformer Engine's layers their regions. Megatron chooses the class of an MLP by the
    implementation, which knows no other; the modules and parameters inside stay the same."""
    for layer in (module for chunk in chunks for module in chunk.modules() if isinstance(module, TransformerLayer)):
        if type(layer.mlp) is MLP:
            layer.mlp.__class__ = FusedNormDenseMLP
    return list(chunks)
