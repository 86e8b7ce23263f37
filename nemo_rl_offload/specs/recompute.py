"""What is recomputed: NeMo-RL's switch `activation_checkpointing` together with Megatron-Core's own keys."""

from collections.abc import Mapping
from typing import Any

from nemo_rl_offload.specs.offload_modules import DENSE_MLP_RECOMPUTE

RECOMPUTE_KEYS = ("recompute_granularity", "recompute_modules", "recompute_method", "recompute_num_layers")


def recompute_settings(cfg: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of `RECOMPUTE_KEYS` that are in force.

    As in NeMo-RL, true fills in what Megatron-Core must be told, one layer at a time, and false turns everything off.
    """
    given = {key: cfg[key] for key in RECOMPUTE_KEYS}
    if cfg["activation_checkpointing"] is None:
        return given
    if not cfg["activation_checkpointing"]:
        return dict.fromkeys(RECOMPUTE_KEYS)
    granularity = given["recompute_granularity"] or "full"
    layers = {"recompute_method": "uniform", "recompute_num_layers": 1} if granularity == "full" else {}
    filled = {key: value for key, value in layers.items() if given[key] is None}
    return given | filled | {"recompute_granularity": granularity}


def recomputed_modules(settings: Mapping[str, Any]) -> list[str]:
    """The modules that selective recomputation covers, of settings in force; none without it."""
    if settings["recompute_granularity"] != "selective":
        return []
    modules = settings["recompute_modules"]
    return ["core_attn"] if modules is None else list(modules)


def known_to_megatron(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The same keys without what only this project does: parts of dense MLPs, and a number of layers for modules."""
    if settings["recompute_granularity"] != "selective" or settings["recompute_modules"] is None:
        return dict(settings)
    modules = [name for name in settings["recompute_modules"] if name not in DENSE_MLP_RECOMPUTE]
    return {**settings, "recompute_modules": modules, "recompute_num_layers": None}
