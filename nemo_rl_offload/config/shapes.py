"""The shape of a model, from the `config.json` of its Hugging Face folder or from the catalogue of public models."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nemo_rl_offload.config.loader import resolve_model_path
from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.specs.catalogue import find_config, read_config_file


@dataclass(frozen=True)
class Shape:
    """What rules must know of a model; families as Megatron-Bridge reads them (Qwen, Llama, DeepSeek, Mixtral)."""

    layers_with_experts: list[bool]
    """Of each layer whether it has experts."""
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    """0 where the model does not say."""
    has_shared_experts: bool
    has_latent_attention: bool
    has_linear_attention: bool
    predicts_further_tokens: bool
    """Multi-token prediction."""
    max_positions: int
    """Longest sequence that the model is made for; 0 where it does not say."""
    activation: str | None
    """Hugging Face's name of the activation in the MLP."""

    @property
    def has_experts(self) -> bool:
        """Whether any layer has experts."""
        return any(self.layers_with_experts)


def read_shape(model_name: str) -> Shape:
    """Read the shape of a model. Raises ConfigError as `read_model_config` does."""
    content = read_model_config(model_name)
    activation = content.get("hidden_act")
    num_heads = max(1, _whole(content, "num_attention_heads", 1))
    return Shape(
        layers_with_experts=_layers_with_experts(content),
        num_attention_heads=num_heads,
        num_key_value_heads=_whole(content, "num_key_value_heads", num_heads),
        vocab_size=_whole(content, "vocab_size"),
        has_shared_experts=_whole(content, "n_shared_experts") + _whole(content, "shared_expert_intermediate_size") > 0,
        has_latent_attention=_whole(content, "kv_lora_rank") > 0,
        has_linear_attention=_whole(content, "linear_num_value_heads") > 0,
        predicts_further_tokens=_whole(content, "num_nextn_predict_layers") > 0,
        max_positions=_whole(content, "max_position_embeddings"),
        activation=activation if isinstance(activation, str) else None,
    )


def read_model_config(model_name: str) -> Mapping[str, Any]:
    """Return what the `config.json` of a local folder holds, or that of a public model by its hub name.

    Raises ConfigError when the model is neither, or its file cannot be read.
    """
    try:
        path = resolve_model_path(model_name) / "config.json"
    except ConfigError:
        if (public := find_config(model_name)) is None:
            raise
        return public
    return read_config_file(path)


def _whole(content: Mapping[str, Any], key: str, default: int = 0) -> int:
    return value if isinstance(value := content.get(key), int) else default


def _layers_with_experts(content: Mapping[str, Any]) -> list[bool]:
    num_experts = max(_whole(content, key) for key in ("num_experts", "num_local_experts", "n_routed_experts"))
    step = max(1, _whole(content, "decoder_sparse_step", 1))
    frequency = max(1, _whole(content, "moe_layer_freq", 1))
    listed = content.get("mlp_only_layers")
    dense_layers = listed if isinstance(listed, list) else []
    return [
        num_experts > 0
        and (layer + 1) % step == 0
        and layer % frequency == 0
        and layer >= _whole(content, "first_k_dense_replace")
        and layer not in dense_layers
        for layer in range(max(1, _whole(content, "num_hidden_layers", 1)))
    ]
