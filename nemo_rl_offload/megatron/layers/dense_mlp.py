"""Megatron's dense MLP with two regions that Megatron does not have: `mlp_fc1` and `mlp_act`.

`mlp_act` is around the activation. Where `mlp_fc1` is depends on the layers:
- plain torch: around the first linear alone. The norm before it is `mlp_norm`, another region of the same module
  (`linear_fc1`).
- Transformer Engine: around norm and linear, which are one kernel there. What it saves, the norm's input and output,
  all belongs to `mlp_fc1`.
"""

from collections.abc import Collection, Sequence
from functools import partial

import torch.nn.functional as F
from megatron.core.fusions.fused_bias_geglu import bias_geglu_impl
from megatron.core.fusions.fused_bias_gelu import bias_gelu_impl
from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from nemo_rl_offload.adapters.megatron_core.interface import no_regions, offload_region
from nemo_rl_offload.megatron.layers.recomputation import recomputed
from nemo_rl_offload.specs.parallel_layout import counted_layers


class DenseMLP(MLP):  # type: ignore[misc]
    """[sequence, batch, hidden] in and out; what it computes is Megatron's."""

    recompute: str | None = None
    """mlp_act: the activation is run again in backward; mlp_fc1: what comes before it, too."""
    input_module = "mlp_norm"
    """The region that saves the MLP's input."""

    def forward(
        self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **_unused: object
    ) -> tuple[Tensor, Tensor | None]:
        assert per_token_scale is None, "a scale per token belongs to experts"
        if self.recompute is not None:
            return self._recomputing(hidden_states)
        x, bias = self._first_linear(hidden_states)
        act = offload_region(self.config, x, "mlp_act", self.training)
        with act as x:
            y = self._activate(x, bias)
        output, output_bias = self.linear_fc2(y)
        return act.group_offload(output), output_bias

    def _recomputing(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        module, function = self.input_module, self._to_activation
        if self.recompute == "mlp_act":
            x, bias = self._first_linear(x)
            module, function = "mlp_act", partial(self._activate, bias=bias)
        region = offload_region(self.config, x, module, self.training)
        with region as x:
            activated = recomputed(function, x)
        with activated.users():
            output, output_bias = self.linear_fc2(activated.output)
        return region.group_offload(output), output_bias

    def _to_activation(self, x: Tensor) -> Tensor:
        with no_regions():
            return self._activate(*self.linear_fc1(x))

    def _first_linear(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """[sequence, batch, hidden] to [sequence, batch, ffn]; `linear_fc1` opens its own regions."""
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

    input_module = "mlp_fc1"

    def _first_linear(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """[sequence, batch, hidden] to [sequence, batch, ffn]."""
        region = offload_region(self.config, x, "mlp_fc1", self.training)
        with region as x:
            output, bias = self.linear_fc1(x)
        return region.group_offload(output), bias


def open_dense_mlps(chunks: Sequence[nn.Module]) -> list[nn.Module]:
    """Give the dense MLPs of Transformer Engine's layers their regions. Megatron chooses the class of an MLP by the
    implementation, which knows no other; the modules and parameters inside stay the same."""
    for layer in _layers_of(chunks):
        if type(layer.mlp) is MLP:
            layer.mlp.__class__ = FusedNormDenseMLP
    return list(chunks)


def recompute_dense_mlps(
    chunks: Sequence[nn.Module], modules: Collection[str], num_layers: int | None
) -> list[nn.Module]:
    """Let dense MLPs recompute what `modules`, entries of `recompute_modules`, say.

    `mlp` and `mlp_fc1` are for `num_layers` layers of each chunk (`counted_layers`); None: all. `mlp_act` is for all
    others.
    """
    for chunk in chunks:
        layers = _layers_of([chunk])
        is_dense = [isinstance(layer.mlp, MLP) for layer in layers]
        counted = counted_layers(is_dense, num_layers, ends_with_loss=bool(chunk.post_process))
        for number, layer in enumerate(layers):
            if not is_dense[number]:
                layer.recompute_mlp = False  # Megatron's checkpoint around no MLP would hold what the layer mixed
                continue
            is_more = number in counted
            layer.recompute_mlp = "mlp" in modules and is_more
            names = [name for name in ("mlp_fc1", "mlp_act") if name in modules and (is_more or name == "mlp_act")]
            if names:
                assert isinstance(layer.mlp, DenseMLP), "checked with the configuration"
                layer.mlp.recompute = None if layer.recompute_mlp else names[0]
    return list(chunks)


def _layers_of(chunks: Sequence[nn.Module]) -> list[TransformerLayer]:
    return [module for chunk in chunks for module in chunk.modules() if isinstance(module, TransformerLayer)]
