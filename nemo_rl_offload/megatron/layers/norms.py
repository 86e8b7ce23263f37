"""Norms in plain torch, alone and fused with the linear behind them, and the regions inside.

Two things follow from fusing norm and linear into one module. Megatron itself skips `attn_norm` and `mlp_norm` there,
since the norm has no boundary of its own; here the norm part opens that region inside the module. And the linear part
of a dense MLP can be a region too (`mlp_fc1`; `dense_mlp` has the other one), which Megatron cannot offload at all.
"""

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from nemo_rl_offload.adapters.megatron_core.interface import offload_region
from nemo_rl_offload.errors import ConfigError


def _normalize(x: Tensor, weight: Tensor, bias: Tensor | None, config: TransformerConfig, eps: float) -> Tensor:
    """`x` [..., hidden] over its last dimension; `weight` and `bias` [hidden]."""
    if config.layernorm_zero_centered_gamma:
        weight = weight + 1
    if config.normalization == "RMSNorm":
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


def _norm_parameters(config: TransformerConfig, size: int) -> tuple[torch.nn.Parameter, torch.nn.Parameter | None]:
    if config.normalization not in ("RMSNorm", "LayerNorm"):
        raise ConfigError(f"transformer_impl: torch has no normalization {config.normalization!r}")
    device = None if config.use_cpu_initialization else torch.cuda.current_device()
    fill = 0.0 if config.layernorm_zero_centered_gamma else 1.0
    weight = torch.nn.Parameter(torch.full((size,), fill, dtype=config.params_dtype, device=device))
    bias = None
    if config.normalization == "LayerNorm":
        bias = torch.nn.Parameter(torch.zeros(size, dtype=config.params_dtype, device=device))
    for parameter in [weight] if bias is None else [weight, bias]:
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return weight, bias


class TorchNorm(torch.nn.Module):
    """RMSNorm or LayerNorm over the last dimension, as the configuration says; input and output [..., hidden]."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_unused: object) -> None:
        super().__init__()
        self.config, self.eps = config, eps
        self.weight, self.bias = _norm_parameters(config, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return _normalize(x, self.weight, self.bias, self.config, self.eps)


# Bridge recognises a fused norm+linear by `LayerNormColumnParallelLinear` in the class name.
class TorchLayerNormColumnParallelLinear(ColumnParallelLinear):  # type: ignore[misc]
    """Norm, then column-parallel linear: input [sequence, batch, hidden], output [sequence, batch, out / TP].

    The norm is the region `attn_norm` (before q, k, v) or `mlp_norm` (before a dense MLP), the linear part of a dense
    MLP the region `mlp_fc1`. The linears of latent attention lie in Megatron's region `qkv_linear`.
    """

    return_layernorm_output = False
    """Return (output, what the norm made) in the output's place, as Transformer Engine's does for an adapter."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        tp_comm_buffer_name: str | None = None,
        **kwargs: object,
    ) -> None:
        super().__init__(input_size, output_size, config=config, tp_comm_buffer_name=tp_comm_buffer_name, **kwargs)
        self.layer_norm_weight, self.layer_norm_bias = _norm_parameters(config, input_size)
        self.eps = config.layernorm_epsilon
        self._norm_module = {"qkv": "attn_norm", "fc1": "mlp_norm"}.get(tp_comm_buffer_name or "")
        self._linear_module = "mlp_fc1" if tp_comm_buffer_name == "fc1" else None

    def forward(
        self, x: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor | tuple[Tensor, Tensor], Tensor | None]:
        norm = offload_region(self.config, x, self._norm_module, self.training)
        with norm as x:
            y = _normalize(x, self.layer_norm_weight, self.layer_norm_bias, self.config, self.eps)
        y = norm.group_offload(y)
        if self._linear_module is None:
            output, bias = super().forward(y, *args, **kwargs)
        else:
            linear = offload_region(self.config, y, self._linear_module, self.training)
            with linear as x:
                output, bias = super().forward(x, *args, **kwargs)
            output = linear.group_offload(output)
        return ((output, y) if self.return_layernorm_output else output), bias
