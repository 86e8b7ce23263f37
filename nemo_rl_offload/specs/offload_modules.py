"""Names of the modules whose saved activations can be offloaded.

A name stands for the tensors that autograd saves inside one module of a transformer layer, mostly its input.
Megatron-Core's names come first and keep its order (`TransformerConfig.offload_modules`).
"""

MEGATRON_MODULES = (
    "attn_norm",
    "qkv_linear",
    "core_attn",
    "attn_proj",
    "mlp_norm",
    "expert_fc1",
    "moe_act",
    "fused_group_mlp",
)
"""What Megatron-Core's own engine can offload."""

NATIVE_MODULES = (*MEGATRON_MODULES[:-1], "mlp_fc1", "mlp_act", "expert_fc2", "shared_experts")
"""What this project's engine can offload."""

MOE_MODULES = ("expert_fc1", "moe_act", "fused_group_mlp", "expert_fc2", "shared_experts")
"""Modules that only a layer with experts has."""

STASHED_MODULES = ("expert_fc1", "moe_act", "fused_group_mlp", "expert_fc2")
"""Modules whose saved tensors the paged stash holds."""

DENSE_MLP_MODULES = ("mlp_fc1", "mlp_act")
"""Modules that only a layer without experts has."""

SUPPORTED_MODULES = NATIVE_MODULES
"""Modules that a configuration may list."""

TRANSFORMER_ENGINE_MODULES = (*MEGATRON_MODULES, *DENSE_MLP_MODULES)
"""What can be offloaded of Transformer Engine's layers."""

DENSE_MLP_RECOMPUTE = ("mlp_fc1", "mlp_act")
"""Entries of `recompute_modules` that only this project has, parts of a dense MLP: to the activation's output from the
MLP's input, or from the first linear's output."""

COUNTED_RECOMPUTE = ("mlp", "mlp_fc1")
"""Entries of `recompute_modules` that `recompute_num_layers` limits to some layers."""

DISCARDED_BY_RECOMPUTE = {
    "layernorm": ("qkv_linear", "shared_experts"),
    "moe_act": ("expert_fc2",),
    "mla_up_proj": ("core_attn",),
}
"""Modules that save what `recompute_modules` makes Megatron free by force, while a copy of it may be on its way; the
layer norm's output where norm and linear are not one module."""


def discarded_by_recompute(has_latent_attention: bool) -> dict[str, tuple[str, ...]]:
    """`DISCARDED_BY_RECOMPUTE` of a model: without latent attention, attention's modules save nothing of it."""
    return {
        name: tuple(each for each in modules if has_latent_attention or each not in ("qkv_linear", "core_attn"))
        for name, modules in DISCARDED_BY_RECOMPUTE.items()
    }


def fused_norms(has_latent_attention: bool, has_experts: bool) -> list[str]:
    """Norms that are no module of their own in Transformer Engine's layers."""
    is_own = {"attn_norm": has_latent_attention, "mlp_norm": has_experts}
    return [name for name, own in is_own.items() if not own]
