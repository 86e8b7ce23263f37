"""The modules whose saved activations can be offloaded, one record each.

A name stands for the tensors that autograd saves inside one module of a transformer layer, mostly its input.
Megatron-Core's names come first and keep its order (`TransformerConfig.offload_modules`).
"""

from dataclasses import dataclass
from typing import Literal

type Engine = Literal["megatron", "native"]


@dataclass(frozen=True, kw_only=True)
class OffloadModule:
    """What is known of a module."""

    name: str
    engines: tuple[Engine, ...] = ("megatron", "native")
    """Megatron-Core's own engine, and this project's."""
    layers: Literal["all", "dense", "experts"] = "all"
    """The layers that have it: all, or only those without experts, or only those with."""
    in_transformer_engine: bool = True
    """Whether it can be offloaded of Transformer Engine's layers."""
    is_stashed: bool = False
    """Whether the paged stash holds what it saves."""
    discarded_by: str | None = None
    """Entry of `recompute_modules` with which Megatron frees by force what this module saves, while a copy may be on
    its way."""
    discarded_in: Literal["all", "latent"] = "all"
    """Attention that this is true of: all, or latent attention alone."""
    captured_within: tuple[str, ...] = ()
    """Parts of a layer (`cuda_graph_modules`) with each of which a CUDA graph holds what this module saves."""


MODULES = (
    OffloadModule(name="attn_norm", captured_within=("attn",)),
    OffloadModule(
        name="qkv_linear",
        captured_within=("attn",),
        discarded_by="layernorm",
        discarded_in="latent",
    ),
    OffloadModule(
        name="core_attn",
        captured_within=("attn",),
        discarded_by="mla_up_proj",
        discarded_in="latent",
    ),
    OffloadModule(name="attn_proj", captured_within=("attn",)),
    OffloadModule(name="mlp_norm", captured_within=("attn", "mlp", "moe_router")),  # on the border of attention
    OffloadModule(name="expert_fc1", layers="experts", is_stashed=True),
    OffloadModule(name="moe_act", layers="experts", is_stashed=True),
    OffloadModule(
        name="fused_group_mlp",
        engines=("megatron",),
        layers="experts",
        is_stashed=True,
    ),
    OffloadModule(name="mlp_fc1", engines=("native",), layers="dense", captured_within=("mlp",)),
    OffloadModule(name="mlp_act", engines=("native",), layers="dense", captured_within=("mlp",)),
    OffloadModule(
        name="expert_fc2",
        engines=("native",),
        layers="experts",
        in_transformer_engine=False,
        is_stashed=True,
        discarded_by="moe_act",
    ),
    OffloadModule(
        name="shared_experts",
        engines=("native",),
        layers="experts",
        in_transformer_engine=False,
        discarded_by="layernorm",
        captured_within=("moe_router",),
    ),
)

MEGATRON_MODULES = tuple(module.name for module in MODULES if "megatron" in module.engines)
"""What Megatron-Core's own engine can offload."""

NATIVE_MODULES = tuple(module.name for module in MODULES if "native" in module.engines)
"""What this project's engine can offload."""

MOE_MODULES = tuple(module.name for module in MODULES if module.layers == "experts")
"""Modules that only a layer with experts has."""

STASHED_MODULES = tuple(module.name for module in MODULES if module.is_stashed)
"""Modules whose saved tensors the paged stash holds."""

DENSE_MLP_MODULES = tuple(module.name for module in MODULES if module.layers == "dense")
"""Modules that only a layer without experts has."""

SUPPORTED_MODULES = NATIVE_MODULES
"""Modules that a configuration may list."""

CAPTURED_WITHIN = {module.name: module.captured_within for module in MODULES}
"""The parts of a layer with each of which a CUDA graph holds what a module saves."""

TRANSFORMER_ENGINE_MODULES = tuple(module.name for module in MODULES if module.in_transformer_engine)
"""What can be offloaded of Transformer Engine's layers."""

DENSE_MLP_RECOMPUTE = ("mlp_fc1", "mlp_act")
"""Entries of `recompute_modules` that only this project has, parts of a dense MLP: to the activation's output from the
MLP's input, or from the first linear's output."""

EXPERT_RECOMPUTE = ("moe_act", "moe")
"""Entries of `recompute_modules` that layers with experts have."""

COUNTED_RECOMPUTE = ("mlp", "mlp_fc1")
"""Entries of `recompute_modules` that `recompute_num_layers` limits to some layers."""

DISCARDED_BY_RECOMPUTE = {
    entry: tuple(module.name for module in MODULES if module.discarded_by == entry)
    for entry in ("layernorm", "moe_act", "mla_up_proj")
}
"""Modules that save what `recompute_modules` makes Megatron free by force, while a copy of it may be on its way; the
layer norm's output where norm and linear are not one module."""


def discarded_by_recompute(has_latent_attention: bool) -> dict[str, tuple[str, ...]]:
    """`DISCARDED_BY_RECOMPUTE` of a model: without latent attention, attention's modules save nothing of it."""
    of_latent = [module.name for module in MODULES if module.discarded_in == "latent"]
    return {
        entry: tuple(name for name in names if has_latent_attention or name not in of_latent)
        for entry, names in DISCARDED_BY_RECOMPUTE.items()
    }


def fused_norms(has_latent_attention: bool, has_experts: bool) -> list[str]:
    """Norms that are no module of their own in Transformer Engine's layers."""
    is_own = {"attn_norm": has_latent_attention, "mlp_norm": has_experts}
    return [name for name, own in is_own.items() if not own]
