"""What the routers of a step measured: the losses that keep experts evenly loaded, logged as NeMo-RL does.

Megatron's routers add to a tracker that belongs to the process and that somebody has to read at the end of each step.
One that nobody reads grows over the steps, and its size stays that of the first model of the process.
"""

from collections.abc import Iterable
from typing import Any

import torch
from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker, get_moe_metrics_tracker
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig

from nemo_rl_offload.specs.hybrid_layers import EXPERTS

_LOSS_NAMES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}


class _Metrics(dict[str, float]):
    """Stands where the tracker expects a TensorBoard writer."""

    def add_scalar(self, name: str, value: torch.Tensor | float, _: int) -> None:
        """A writer's method; `value` is 0-dim."""
        self[f"moe/{name.removeprefix('moe/')}"] = float(value)


def _tracked_names(config: TransformerConfig) -> list[str]:
    kinds, coefficients = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
    pairs = [(kinds, coefficients)] if isinstance(kinds, str) else list(zip(kinds, coefficients, strict=True))
    names = [_LOSS_NAMES[kind] for kind, coefficient in pairs if kind in _LOSS_NAMES and coefficient]
    return names + (["z_loss"] if config.moe_z_loss_coeff else [])


def forget_routing(modules: Iterable[torch.nn.Module]) -> None:
    """Drop what routers of these models counted since the last step's end: in a step that failed."""
    destroy_moe_metrics_tracker()
    for router in (each for module in modules for each in module.modules() if isinstance(each, TopKRouter)):
        if router.local_tokens_per_expert is not None:
            router.local_tokens_per_expert.zero_()


def _has_experts(config: TransformerConfig) -> Any:
    """Megatron's `moe_layer_freq`, whose sum is made right for a hybrid model: Megatron counts one layer with experts
    for each further token, where there are as many as the pattern of their layers has, and one repeated layer once."""
    if not (config.is_hybrid_model and config.mtp_num_layers):
        return config.moe_layer_freq
    num_built = 1 if config.mtp_use_repeated_layer else config.mtp_num_layers
    num_further = num_built * config.mtp_hybrid_override_pattern.count(EXPERTS)
    return [*config.moe_layer_freq, num_further - config.mtp_num_layers]


def collect_moe_metrics(config: TransformerConfig, num_microbatches: int) -> dict[str, float]:
    """The step's balancing losses, `moe/<name>`: a mean over layers with experts, microbatches and ranks.

    With `moe_per_layer_logging` also `moe/<name>_layer_<index>`. A collective call of all ranks; empties the tracker.
    """
    if config.num_moe_experts is None:
        return {}
    metrics = _Metrics()
    get_moe_metrics_tracker().report(
        loss_scale=1 / num_microbatches,
        iteration=0,
        writer=metrics,
        per_layer_logging=config.moe_per_layer_logging,
        force_initialize=True,
        track_names=_tracked_names(config),
        num_layers=config.num_layers,
        moe_layer_freq=_has_experts(config),
        mtp_num_layers=config.mtp_num_layers,
    )
    destroy_moe_metrics_tracker()
    return dict(metrics)
