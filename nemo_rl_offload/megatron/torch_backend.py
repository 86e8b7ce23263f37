"""Megatron's layers in plain torch: what `transformer_impl: torch` builds.

Megatron-Core chooses the classes of a layer through a `BackendSpecProvider`. Its own `local` provider needs no
Transformer Engine either, but materialises attention scores, cannot mix sequence parallelism with its norms, silently
gives one MLP per expert, and names parameters unlike Transformer Engine, so that checkpoints and Megatron-Bridge's
tables do not fit. This provider keeps Transformer Engine's structure and parameter names (`layer_norm_weight` inside
`linear_qkv` and `linear_fc1`, `weight0..N` in experts) and takes fused torch operators instead.

Two things follow from fusing norm and linear into one module. Megatron itself skips `attn_norm` and `mlp_norm` there,
since the norm has no boundary of its own; here the norm part opens that region inside the module. And the linear part
of a dense MLP can be a region too (`mlp_fc1`, and `mlp_act` in `TorchMLP`), which Megatron cannot offload at all.

Limits: no context parallelism, no packed sequences (THD), no sliding windows, no attention sinks: those are refused
when the layer is built. Sequence parallelism works because a norm acts on each token alone.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
from megatron.core.pipeline_parallel import fine_grained_activation_offload as megatron_offload
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, TEGroupedMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from torch import Tensor

from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.megatron.torch_experts import TorchGroupedLinear


def _offload_region(config: TransformerConfig, tensor: Tensor, module: str, training: bool) -> Any:
    """A region manager of whichever engine is installed; one that does nothing when `module` is not listed."""
    listed = config.fine_grained_activation_offloading and module in config.offload_modules
    return megatron_offload.FineGrainedActivationOffloadingInterface(listed and training, tensor, module)


def _normalize(x: Tensor, weight: Tensor, bias: Tensor | None, config: TransformerConfig, eps: float) -> Tensor:
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

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_unused: Any) -> None:
        super().__init__()
        self.config, self.eps = config, eps
        self.weight, self.bias = _norm_parameters(config, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return _normalize(x, self.weight, self.bias, self.config, self.eps)


# Bridge recognises a fused norm+linear by `LayerNormColumnParallelLinear` in the class name.
class TorchLayerNormColumnParallelLinear(ColumnParallelLinear):  # type: ignore[misc]
    """Norm, then column-parallel linear: input [sequence, batch, hidden], output [sequence, batch, out / TP].

    The norm is the region `attn_norm` (before q, k, v) or `mlp_norm` (before a dense MLP), the linear part of a dense
    MLP the region `mlp_fc1`.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        tp_comm_buffer_name: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(input_size, output_size, config=config, tp_comm_buffer_name=tp_comm_buffer_name, **kwargs)
        self.layer_norm_weight, self.layer_norm_bias = _norm_parameters(config, input_size)
        self._norm_module = "attn_norm" if tp_comm_buffer_name == "qkv" else "mlp_norm"
        self._linear_module = "mlp_fc1" if tp_comm_buffer_name == "fc1" else None

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        norm = _offload_region(self.config, x, self._norm_module, self.training)
        with norm as x:
            y = _normalize(x, self.layer_norm_weight, self.layer_norm_bias, self.config, self.config.layernorm_epsilon)
        y = norm.group_offload(y)
        if self._linear_module is None:
            return super().forward(y, *args, **kwargs)  # type: ignore[no-any-return]
        linear = _offload_region(self.config, y, self._linear_module, self.training)
        with linear as y:
            output, bias = super().forward(y, *args, **kwargs)
        return linear.group_offload(output), bias


class TorchMLP(MLP):  # type: ignore[misc]
    """Megatron's dense MLP whose activation is the region `mlp_act`; [sequence, batch, hidden] in and out."""

    def forward(
        self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **_unused: Any
    ) -> tuple[Tensor, Tensor | None]:
        assert per_token_scale is None, "a scale per token belongs to experts"
        x, bias = self.linear_fc1(hidden_states)
        act = _offload_region(self.config, x, "mlp_act", self.training)
        with act as x:
            y = self._activate(x, bias)
        output, output_bias = self.linear_fc2(y)
        return act.group_offload(output), output_bias

    def _activate(self, x: Tensor, bias: Tensor | None) -> Tensor:
        config = self.config
        if config.bias_activation_fusion and config.gated_linear_unit and config.activation_func == F.silu:
            return bias_swiglu_impl(x, bias)  # type: ignore[no-any-return]
        if bias is not None:
            x = x + bias
        if not config.gated_linear_unit:
            return self.activation_func(x)  # type: ignore[no-any-return]
        gate, up = x.chunk(2, dim=-1)
        return config.activation_func(gate) * up  # type: ignore[no-any-return]


class TorchDotProductAttention(MegatronModule):  # type: ignore[misc]
    """`torch.nn.functional.scaled_dot_product_attention` in Megatron's layout.

    query [sq, b, heads / TP, d_qk], key [sk, b, groups / TP, d_qk], value [sk, b, groups / TP, d_v]; the result is
    [sq, b, heads / TP * d_v]. `attention_mask` is boolean, True where attention is forbidden, and broadcasts to
    [b, heads, sq, sk]; without one, a causal mask type is causal by position and `no_mask` attends everywhere.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **_unused: Any,
    ) -> None:
        super().__init__(config=config)
        refused = {
            "context_parallel_size": config.context_parallel_size > 1,
            "window_size": config.window_size is not None,
            "softmax_type": config.softmax_type != "vanilla",
        }
        if any(refused.values()):
            keys = ", ".join(key for key, refuse in refused.items() if refuse)
            raise ConfigError(
                f"transformer_impl: torch does not have what this model asks for: {keys}; use transformer_engine"
            )
        self.attn_mask_type = attn_mask_type
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.softmax_scale = softmax_scale
        if config.apply_query_key_layer_scaling:
            scale = softmax_scale or config.kv_channels**-0.5
            self.softmax_scale = scale / max(1, layer_number)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        assert attention_bias is None, "not taken by this backend"
        assert packed_seq_params is None, "not taken by this backend"
        mask_type = attn_mask_type or self.attn_mask_type
        # A single new token sees the whole cache; torch's `is_causal` would align it with the cache's start.
        causal = mask_type in (AttnMaskType.causal, AttnMaskType.padding_causal) and attention_mask is None
        allowed = None if attention_mask is None or mask_type == AttnMaskType.no_mask else ~attention_mask
        dropout = self.dropout if self.training else 0.0
        q_BNSD, k_BGSD, v_BGSD = (t.permute(1, 2, 0, 3) for t in (query, key, value))

        def attend() -> Tensor:
            return F.scaled_dot_product_attention(
                q_BNSD,
                k_BGSD,
                v_BGSD,
                attn_mask=allowed,
                is_causal=causal,
                dropout_p=dropout,
                scale=self.softmax_scale,
                enable_gqa=q_BNSD.shape[1] != k_BGSD.shape[1],
            )

        if dropout > 0 and not self.config.sequence_parallel:
            with get_cuda_rng_tracker().fork():
                out_BNSD = attend()
        else:
            out_BNSD = attend()
        return out_BNSD.permute(2, 0, 1, 3).flatten(2)


class TorchSpecProvider(BackendSpecProvider):  # type: ignore[misc]
    """The classes a Megatron layer is built from when Transformer Engine is not used."""

    def column_parallel_linear(self) -> type:
        return ColumnParallelLinear  # type: ignore[no-any-return]

    def row_parallel_linear(self) -> type:
        return RowParallelLinear  # type: ignore[no-any-return]

    def fuse_layernorm_and_linear(self) -> bool:
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        return TorchLayerNormColumnParallelLinear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> type:
        return TorchNorm

    def core_attention(self) -> type:
        return TorchDotProductAttention

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool) -> Callable[..., TEGroupedMLP]:
        submodules = GroupedMLPSubmodules(linear_fc1=TorchGroupedLinear, linear_fc2=TorchGroupedLinear)
        return partial(TEGroupedMLP, submodules=submodules)

    def activation_func(self) -> None:
        return None


def _layer_spec(config: TransformerConfig, num_experts: int | None) -> ModuleSpec:
    backend = TorchSpecProvider()
    qk_norm = backend.layer_norm(for_qk=True) if config.qk_layernorm else IdentityOp
    mlp = get_mlp_module_spec_for_backend(backend=backend, num_experts=num_experts, moe_grouped_gemm=True)
    if num_experts is None:
        mlp = partial(TorchMLP.as_mlp_submodule, submodules=mlp.keywords["submodules"])
    attention = SelfAttentionSubmodules(
        linear_qkv=backend.column_parallel_layer_norm_linear(),
        core_attention=backend.core_attention(),
        linear_proj=backend.row_parallel_linear(),
        q_layernorm=qk_norm,
        k_layernorm=qk_norm,
    )
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=attention,
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=IdentityOp if num_experts is None else backend.layer_norm(),
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
        ),
    )


def torch_block_spec(config: TransformerConfig, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """The decoder layers of this pipeline stage, dense or MoE as `config.moe_layer_freq` says, and the final norm.

    Raises ConfigError for a model family whose layers this backend does not have.
    """
    if config.multi_latent_attention:
        raise ConfigError("transformer_impl: torch has no multi-latent attention yet; use transformer_engine")
    if config.num_moe_experts is None:
        is_moe = [False] * config.num_layers
    elif isinstance(config.moe_layer_freq, int):
        is_moe = [layer % config.moe_layer_freq == 0 for layer in range(config.num_layers)]
    else:
        is_moe = [bool(layer) for layer in config.moe_layer_freq]
    offset = get_transformer_layer_offset(config, vp_stage=vp_stage)
    num_layers = get_num_layers_to_build(config, vp_stage=vp_stage)
    specs = [
        _layer_spec(config, config.num_moe_experts if moe else None) for moe in is_moe[offset : offset + num_layers]
    ]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=TorchNorm)
