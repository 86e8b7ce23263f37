"""The ways to spend less memory that `bench offload` compares: this engine's, and what else one would use."""

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from nemo_rl_offload.adapters.torch_modules import ActivationOffload, offload_activations
from nemo_rl_offload.errors import ConfigError, nearest
from nemo_rl_offload.units import MIB

PLAIN = "none"
MODULE_SETS = {
    "core_attn": ("core_attn",),
    "norms": ("attn_norm", "mlp_norm"),
    "mlp": ("mlp_norm", "mlp_fc1", "mlp_act"),
    "all": ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "mlp_fc1", "mlp_act"),
}
TRANSFORMER_ENGINES = {
    "Transformer Engine: half of the layers": 0.5,
    "Transformer Engine: all layers but one": 1.0,
}
AUTO_BUDGETS = (0.95, 0.9, 0.85, 0.8, 0.7)
"""Shares of the peak without offloading."""


@dataclass(frozen=True)
class Variant:
    """One way to spend less memory. `enter` makes it effective for a model until the context is left."""

    name: str
    enter: Callable[[nn.Module], AbstractContextManager[ActivationOffload | None]]


@contextmanager
def _ours(
    model: nn.Module, modules: Sequence[str], min_tensor_bytes: int, budget: str | None = None
) -> Iterator[ActivationOffload | None]:
    with offload_activations(model, modules, min_tensor_bytes=min_tensor_bytes, gpu_memory_budget=budget) as offload:
        yield offload


@contextmanager
def _recompute_layers(model: Any) -> Iterator[None]:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    try:
        yield
    finally:
        model.gradient_checkpointing_disable()


@contextmanager
def _recompute_mlps(model: nn.Module) -> Iterator[None]:
    mlps = [module for name, module in model.named_modules() if name.endswith(".mlp")]
    for mlp in mlps:
        mlp.forward = partial(checkpoint, mlp.forward, use_reentrant=False)
    try:
        yield
    finally:
        for mlp in mlps:
            del mlp.forward


@contextmanager
def _trl(model: nn.Module) -> Iterator[None]:
    context = importlib.import_module("trl.models.activation_offloading").get_act_offloading_ctx_manager
    with context(model):
        yield


@contextmanager
def _transformer_engine(model: Any, share: float) -> Iterator[None]:
    layers = model.model.layers
    context, synchronize = importlib.import_module("transformer_engine.pytorch").get_cpu_offload_context(
        enabled=True, num_layers=min(int(len(layers) * share), len(layers) - 1), model_layers=len(layers)
    )
    push = context.offload_synchronizer.push_tensor

    def push_without_base(tensor: Tensor) -> object:
        """A view is offloaded by its base, which fails where that is strided, as what attention returns to Qwen2."""
        is_strided = tensor._base is not None and not tensor._base.is_contiguous()
        return push(tensor.detach() if is_strided and tensor.is_contiguous() else tensor)

    context.offload_synchronizer.push_tensor = push_without_base

    def offloaded(forward: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        with context:
            output = forward(*args, **kwargs)
        return synchronize(output)  # type: ignore[no-any-return]

    for layer in layers:
        layer.forward = partial(offloaded, layer.forward)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def variants(device: torch.device, peak_bytes: int, names: Sequence[str] | None = None) -> list[Variant]:
    """All variants that this machine can run, or those of `names`; the first is without anything. `peak_bytes` is the
    peak without offloading. Raises ConfigError for an unknown name."""
    ours = partial(_ours, min_tensor_bytes=MIB if device.type == "cuda" else 0)
    every = [Variant(PLAIN, lambda model: nullcontext())]
    every += [Variant(f"ours: {name}", partial(ours, modules=modules)) for name, modules in MODULE_SETS.items()]
    for share in AUTO_BUDGETS:
        budget = f"{peak_bytes * share / MIB:.3f}MiB"
        every.append(Variant(f"ours: auto {share:.0%}", partial(ours, modules="auto", budget=budget)))
    every += [
        Variant("recompute: layers", _recompute_layers),
        Variant("recompute: mlp", _recompute_mlps),
        Variant("save_on_cpu", lambda model: save_on_cpu(pin_memory=device.type == "cuda")),
    ]
    if importlib.util.find_spec("trl") is not None and device.type == "cuda":
        every.append(Variant("TRL OffloadActivations", _trl))
    if importlib.util.find_spec("transformer_engine") is not None and device.type == "cuda":
        every += [
            Variant(name, partial(_transformer_engine, share=share)) for name, share in TRANSFORMER_ENGINES.items()
        ]
    if names is None:
        return every
    known = [each.name for each in every]
    for name in names:
        if name not in known:
            raise ConfigError(f"no variant '{name}' here; there are: {', '.join(known)}.{nearest(name, known)}")
    return [each for each in every if each.name == PLAIN or each.name in names]
