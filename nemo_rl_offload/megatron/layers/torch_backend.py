"""Megatron's layers in plain torch: what `transformer_impl: torch` builds.

Megatron-Core chooses the classes of a layer through a `BackendSpecProvider`. Its own `local` provider needs no
Transformer Engine either, but materialises attention scores, cannot mix sequence parallelism with its norms, silently
gives one MLP per expert, and names parameters unlike Transformer Engine, so that checkpoints and Megatron-Bridge's
tables do not fit. This provider keeps Transformer Engine's structure and parameter names (`layer_norm_weight` inside
`linear_qkv` and `linear_fc1`, `weight0..N` in experts) and takes fused torch operators instead (`attention`,
`norms`, `torch_experts`).

Sequence parallelism works because a norm acts on each token alone.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_mtp_block_spec_for_backend,
    get_mlp_module_spec_for_backend,
)
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import GroupedMLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlockSubmodules,
    get_mtp_layer_spec_for_backend,
    get_mtp_num_layers_to_build,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)

from nemo_rl_offload.megatron.layers.attention import TorchDotProductAttention, TorchMLASelfAttention
from nemo_rl_offload.megatron.layers.delta_net import TorchGatedDeltaNet
from nemo_rl_offload.megatron.layers.dense_mlp import DenseMLP
from nemo_rl_offload.megatron.layers.hybrid_mtp import HybridMTPLayers
from nemo_rl_offload.megatron.layers.mamba import TorchMambaMixer
from nemo_rl_offload.megatron.layers.norms import TorchLayerNormColumnParallelLinear, TorchNorm
from nemo_rl_offload.megatron.layers.shared_experts import TorchSharedExpertMLP
from nemo_rl_offload.megatron.layers.static_experts import TorchGroupedMLP, TorchMoELayer
from nemo_rl_offload.megatron.layers.torch_experts import (
    TorchColumnParallelGroupedLinear,
    TorchRowParallelGroupedLinear,
)
from nemo_rl_offload.specs.hybrid_layers import ATTENTION, EXPERTS, MAMBA


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

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool) -> Callable[..., TorchGroupedMLP]:
        submodules = GroupedMLPSubmodules(
            linear_fc1=TorchColumnParallelGroupedLinear, linear_fc2=TorchRowParallelGroupedLinear
        )
        return partial(TorchGroupedMLP, submodules=submodules)

    def activation_func(self) -> None:
        return None


_BACKEND = TorchSpecProvider()


def _mlp(num_experts: int | None) -> Callable[..., MLP | MoELayer]:
    mlp = get_mlp_module_spec_for_backend(backend=_BACKEND, num_experts=num_experts, moe_grouped_gemm=True)
    submodules = mlp.keywords["submodules"]
    if num_experts is None:
        return partial(DenseMLP.as_mlp_submodule, submodules=submodules)
    shared_experts = partial(TorchSharedExpertMLP, **submodules.shared_experts.keywords)
    return partial(TorchMoELayer, submodules=dataclasses.replace(submodules, shared_experts=shared_experts))


def _attention(config: TransformerConfig) -> ModuleSpec:
    linear, fused_linear = _BACKEND.column_parallel_linear(), _BACKEND.column_parallel_layer_norm_linear()
    norm = TorchNorm if config.qk_layernorm else IdentityOp
    submodules: SelfAttentionSubmodules | MLASelfAttentionSubmodules
    if config.multi_latent_attention:
        up = fused_linear if config.qk_layernorm else linear
        submodules = MLASelfAttentionSubmodules(
            linear_q_proj=linear,
            linear_q_down_proj=linear,
            linear_q_up_proj=up,
            linear_kv_down_proj=linear,
            linear_kv_up_proj=up,
            core_attention=_BACKEND.core_attention(),
            linear_proj=_BACKEND.row_parallel_linear(),
            q_layernorm=IdentityOp,
            kv_layernorm=IdentityOp,
        )
    else:
        submodules = SelfAttentionSubmodules(
            linear_qkv=fused_linear,
            core_attention=_BACKEND.core_attention(),
            linear_proj=_BACKEND.row_parallel_linear(),
            q_layernorm=norm,
            k_layernorm=norm,
        )
    return ModuleSpec(
        module=TorchMLASelfAttention if config.multi_latent_attention else SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=submodules,
    )


def _mixing(config: TransformerConfig, mixer: ModuleSpec) -> dict[str, object]:
    return {
        "input_layernorm": TorchNorm if config.multi_latent_attention else IdentityOp,
        "self_attention": mixer,
        "self_attn_bda": get_bias_dropout_add,
    }


def _feed_forward(num_experts: int | None) -> dict[str, object]:
    return {
        "pre_mlp_layernorm": IdentityOp if num_experts is None else TorchNorm,
        "mlp": _mlp(num_experts),
        "mlp_bda": get_bias_dropout_add,
    }


def _layer(**submodules: object) -> ModuleSpec:
    return ModuleSpec(module=TransformerLayer, submodules=TransformerLayerSubmodules(**submodules))


def _layer_spec(config: TransformerConfig, num_experts: int | None, has_delta_net: bool) -> ModuleSpec:
    mixer = ModuleSpec(TorchGatedDeltaNet) if has_delta_net else _attention(config)
    return _layer(**_mixing(config, mixer), **_feed_forward(num_experts))


def _hybrid_layer_spec(config: TransformerConfig, letter: str) -> ModuleSpec:
    """A layer that mixes tokens or is an MLP, and not both."""
    if letter in (MAMBA, ATTENTION):
        return _layer(**_mixing(config, ModuleSpec(TorchMambaMixer) if letter == MAMBA else _attention(config)))
    return _layer(**_feed_forward(config.num_moe_experts if letter == EXPERTS else None))


def _layer_specs(config: TransformerConfig) -> list[ModuleSpec]:
    """Of all layers of the model: as a hybrid one's pattern says, else dense or MoE as `config.moe_layer_freq` says."""
    if config.is_hybrid_model:
        return [_hybrid_layer_spec(config, letter) for letter in config.hybrid_layer_pattern]
    if config.num_moe_experts is None:
        is_moe = [False] * config.num_layers
    elif isinstance(config.moe_layer_freq, int):
        is_moe = [layer % config.moe_layer_freq == 0 for layer in range(config.num_layers)]
    else:
        is_moe = [bool(layer) for layer in config.moe_layer_freq]
    has_delta_net = map(bool, config.linear_attention_freq or [0] * config.num_layers)
    return [
        _layer_spec(config, config.num_moe_experts if moe else None, delta)
        for moe, delta in zip(is_moe, has_delta_net, strict=True)
    ]


def torch_block_spec(config: TransformerConfig, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """The decoder layers of this pipeline stage, and the final norm."""
    offset = get_transformer_layer_offset(config, vp_stage=vp_stage)
    num_layers = get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(
        layer_specs=_layer_specs(config)[offset : offset + num_layers], layer_norm=TorchNorm
    )


def torch_mtp_block_spec(
    config: TransformerConfig, vp_stage: int | None = None
) -> MultiTokenPredictionBlockSubmodules | None:
    """The layers that predict further tokens, on the pipeline stage that has them; None elsewhere.

    Their transformer layer is of the kind of the model's last one; a hybrid model has several, of a pattern of their
    own.
    """
    if not config.mtp_num_layers:
        return None
    if config.is_hybrid_model:
        if not get_mtp_num_layers_to_build(config, vp_stage=vp_stage):
            return None
        specs = [_hybrid_layer_spec(config, letter) for letter in config.mtp_hybrid_override_pattern]
        # Not a ModuleSpec, of which Megatron takes those of its own layers alone.
        layers = SimpleNamespace(module=HybridMTPLayers, params={"layer_specs": specs})
        each = get_mtp_layer_spec_for_backend(layers, _BACKEND)
        num_built = 1 if config.mtp_use_repeated_layer else config.mtp_num_layers
        return MultiTokenPredictionBlockSubmodules(layer_specs=[each] * num_built)
    last = _layer_specs(config)[-1]
    return get_gpt_mtp_block_spec_for_backend(config, last, _BACKEND, vp_stage=vp_stage)
