"""Names of weights that Megatron-Bridge's tables lack, for values of `config.json` that its authors did not need.

Bridge looks a Megatron parameter up in its model's table, in order. The entries here stand behind those of Bridge, and
are met by parameters alone that the model would otherwise lose. Among them are those of Mamba-2 mixers, which stand
here where a transformer layer has its attention.
"""

from collections.abc import Callable, Collection
from functools import wraps
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig


_OTHER_NAME = "name_of_embedding"
_HYBRID_EMBEDDING = "backbone.embedding.weight"


def tell_names(config: "PretrainedConfig", weights: Collection[str]) -> None:
    """Tell the tables of a model with `config` which of two names its folder has, of those `weights`.

    transformers writes the embedding of Nemotron-H without the s that public folders have, and reads both.
    """
    if config.model_type == "nemotron_h" and _HYBRID_EMBEDDING in weights:
        setattr(config, _OTHER_NAME, _HYBRID_EMBEDDING)


def extend_mappings() -> None:
    """Let every table of a dense or MoE model end with the entries of this module; once for a process."""
    from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
    from megatron.bridge.models.conversion.param_mapping import AutoMapping, GatedMLPMapping, QKVMapping
    from megatron.bridge.models.gemma.gemma3_bridge import Gemma3ModelBridge
    from megatron.bridge.models.gemma.gemma_bridge import GemmaBridge
    from megatron.bridge.models.llama.llama_bridge import LlamaBridge
    from megatron.bridge.models.nemotronh.nemotron_h_bridge import NemotronHBridge
    from megatron.bridge.models.qwen.qwen3_bridge import Qwen3Bridge
    from megatron.bridge.models.qwen.qwen3_moe_bridge import Qwen3MoEBridge

    def entries() -> list[Any]:
        ours, theirs = "decoder.layers.*.", "model.layers.*."
        attention, mlp = f"{theirs}self_attn.", f"{theirs}mlp."
        return [
            AutoMapping("output_layer.weight", "lm_head.weight"),
            QKVMapping(
                f"{ours}self_attention.linear_qkv.bias",
                *(f"{attention}{name}_proj.bias" for name in "qkv"),
            ),
            AutoMapping(f"{ours}self_attention.linear_proj.bias", f"{attention}o_proj.bias"),
            *(
                GatedMLPMapping(f"{ours}mlp.linear_fc1.{kind}", f"{mlp}gate_proj.{kind}", f"{mlp}up_proj.{kind}")
                for kind in ("weight", "bias")
            ),
            *(AutoMapping(f"{ours}mlp.linear_fc2.{kind}", f"{mlp}down_proj.{kind}") for kind in ("weight", "bias")),
            AutoMapping(f"{ours}mlp.linear_fc1.layer_norm_weight", f"{theirs}post_attention_layernorm.weight"),
            AutoMapping(f"{ours}self_attn_bda.norm.weight", f"{theirs}post_attention_layernorm.weight"),
            AutoMapping(f"{ours}mlp_bda.norm.weight", f"{theirs}post_feedforward_layernorm.weight"),
        ]

    def extend(model: type, entries: Callable[[], list[Any]]) -> None:
        table = model.mapping_registry  # type: ignore[attr-defined]

        @wraps(table)
        def extended(self: Any) -> Any:
            name = getattr(self.hf_config, _OTHER_NAME, None)
            first = [] if name is None else [AutoMapping("embedding.word_embeddings.weight", name)]
            return MegatronMappingRegistry(*first, *table(self).mappings, *entries())

        model.mapping_registry = extended  # type: ignore[attr-defined]

    for model in (LlamaBridge, Qwen3Bridge, Qwen3MoEBridge, GemmaBridge, Gemma3ModelBridge):
        extend(model, entries)
    extend(NemotronHBridge, _of_mixers)


def _of_mixers() -> list[Any]:
    from megatron.bridge.models.conversion.param_mapping import (
        AutoMapping,
        ColumnParallelMapping,
        MambaConv1dMapping,
        MambaInProjMapping,
    )

    ours, theirs = "decoder.layers.*.self_attention.", "backbone.layers.*.mixer."
    convolutions = [(f"{ours}conv1d_{kind}", f"{theirs}conv1d.{kind}") for kind in ("weight", "bias")]
    return [
        MambaInProjMapping(f"{ours}in_proj.weight", f"{theirs}in_proj.weight"),
        AutoMapping(f"{ours}in_proj.layer_norm_weight", "backbone.layers.*.norm.weight"),
        AutoMapping(f"{ours}out_proj.weight", f"{theirs}out_proj.weight"),
        *(ColumnParallelMapping(f"{ours}{name}", f"{theirs}{name}") for name in ("A_log", "D", "dt_bias")),
        ColumnParallelMapping(f"{ours}norm_weight", f"{theirs}norm.weight"),
        *(MambaConv1dMapping(*names) for names in convolutions),
    ]
