"""What may be offloaded and recomputed of a job's layers."""

from nemo_rl_offload.planner.job import Job
from nemo_rl_offload.specs.offload_modules import (
    DENSE_MLP_RECOMPUTE,
    MEGATRON_MODULES,
    SUPPORTED_MODULES,
    TRANSFORMER_ENGINE_MODULES,
    fused_norms,
)

SEPARABLE = ("mlp_act", "mla_up_proj", "moe_act", "layernorm")
"""Entries of `recompute_modules` whose time and memory belong to one group each."""


def separable(job: Job) -> tuple[str, ...]:
    """Those of `SEPARABLE` that the chooser may take."""
    return tuple(name for name in SEPARABLE if job.recomputes_mlp_parts or name not in DENSE_MLP_RECOMPUTE)


def recomputable(job: Job) -> tuple[str, ...]:
    """Those of `separable` that the model's layers have."""
    has_experts, is_latent = job.shape.has_experts, job.shape.latent_attention is not None
    there = {
        "mlp_act": job.shape.has_dense_layers,
        "mla_up_proj": is_latent,
        "moe_act": has_experts,
        "layernorm": has_experts or is_latent,
    }
    return tuple(name for name in separable(job) if there[name])


def candidates(job: Job) -> tuple[str, ...]:
    """Modules that the job's engine can offload of its layers: Megatron-Core's, nothing of those recomputed whole."""
    if not job.offloads or (job.recompute.method is not None and not job.native_engine):
        return ()
    names = set(SUPPORTED_MODULES if job.native_engine else MEGATRON_MODULES)
    if job.transformer_engine or job.any_implementation:
        names &= set(TRANSFORMER_ENGINE_MODULES)
    if job.any_implementation and job.recompute.method is None:
        names -= set(fused_norms(job.shape.latent_attention is not None, job.shape.experts is not None))
    return tuple(name for name in SUPPORTED_MODULES if name in names)
