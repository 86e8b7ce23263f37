"""Names of weights that Megatron-Bridge's tables lack, for values of `config.json` that its authors did not need.

Bridge looks a Megatron parameter up in its model's table, in order. The entries here stand behind those of Bridge, and
are met by parameters alone that the model would otherwise lose.
"""

from functools import wraps
from typing import Any


def extend_mappings() -> None:
    """Let every table of a dense or MoE model end with the entries of this module; once for a process."""
    from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
    from megatron.bridge.models.conversion.param_mapping import AutoMapping, GatedMLPMapping, QKVMapping
    from megatron.bridge.models.gemma.gemma3_bridge import Gemma3ModelBridge
    from megatron.bridge.models.gemma.gemma_bridge import GemmaBridge
    from megatron.bridge.models.llama.llama_bridge import LlamaBridge
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

    def extend(model: type) -> None:
        table = model.mapping_registry  # type: ignore[attr-defined]

        @wraps(table)
        def extended(self: object) -> Any:
            return MegatronMappingRegistry(*table(self).mappings, *entries())

        model.mapping_registry = extended  # type: ignore[attr-defined]

    for model in (LlamaBridge, Qwen3Bridge, Qwen3MoEBridge, GemmaBridge, Gemma3ModelBridge):
        extend(model)
