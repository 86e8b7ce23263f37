"""Names of weights that Megatron-Bridge's tables lack, for values of `config.json` that its authors did not need.

Bridge looks a Megatron parameter up in its model's table, in order. The entries here stand behind those of Bridge, and
are met by parameters alone that the model would otherwise lose. Among them are those of Mamba-2 mixers, which stand
here where a transformer layer has its attention.
"""

from collections.abc import Callable, Collection
from contextlib import redirect_stdout
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Any

from nemo_rl_offload.errors import ConfigError

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


def name_for_peft(config: "PretrainedConfig", name: str) -> str:
    """The name of an adapter's weight beside transformers' modules, from that beside the folder's weights.

    Raises ConfigError for those that peft cannot have: of experts that are no modules there, and of `out_proj`.
    """
    if config.model_type != "nemotron_h":
        return name
    for part in (".mixer.experts.", ".mixer.out_proj."):
        if part in name:
            raise ConfigError(
                f"--adapter: peft takes no adapter of {part.strip('.')} of a nemotron_h, which this run has trained. "
                "Leave --adapter out: the export's weights have them merged."
            )
    return name.replace("backbone.", "model.")


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
    from megatron.bridge.models.qwen.qwen35_bridge import Qwen35Bridge, Qwen35MoEBridge

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
            with redirect_stdout(None):  # of layers for further tokens Bridge prints that it makes no second names
                return MegatronMappingRegistry(*first, *table(self).mappings, *entries())

        model.mapping_registry = extended  # type: ignore[attr-defined]

    for model in (LlamaBridge, Qwen3Bridge, Qwen3MoEBridge, GemmaBridge, Gemma3ModelBridge):
        extend(model, entries)
    extend(NemotronHBridge, _of_mixers)
    for model in (Qwen35Bridge, Qwen35MoEBridge):
        extend(model, _of_delta_nets)
    _tell_parts_of_adapters(NemotronHBridge)


def _tell_parts_of_adapters(model: Any) -> None:
    """An adapter's second matrix of `in_proj` has its rows by parts, as the weight beside it; Bridge's table of
    adapters takes every one for whole rows of a rank."""
    from megatron.bridge.models.conversion.param_mapping import MambaInProjMapping

    tasks_of = model.build_adapter_conversion_tasks

    @wraps(tasks_of)
    def with_parts(self: Any, *args: Any, **kwargs: Any) -> Any:
        def told(task: Any) -> Any:
            out = task.linear_out_task
            if ".in_proj.adapter." not in out.param_name:
                return task
            mapping = MambaInProjMapping(out.mapping.megatron_param, out.mapping.hf_param)
            return replace(task, linear_out_task=replace(out, mapping=mapping))

        return {name: [told(task) for task in tasks] for name, tasks in tasks_of(self, *args, **kwargs).items()}

    model.build_adapter_conversion_tasks = with_parts


def _of_delta_nets() -> list[Any]:
    """Bridge's table has a module of the convolution, and a norm that adds 1 to its weight."""
    from megatron.bridge.models.conversion.param_mapping import AutoMapping, GDNConv1dMapping, ReplicatedMapping

    AutoMapping.register_module_type("TorchGatedDeltaNet", "column")
    ours, theirs = "decoder.layers.*.self_attention.", "model.layers.*.linear_attn."
    return [
        GDNConv1dMapping(f"{ours}conv1d_weight", f"{theirs}conv1d.weight"),
        ReplicatedMapping(f"{ours}out_norm_weight", f"{theirs}norm.weight"),
    ]


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
