"""Megatron-Core's offload interface on this project's engine.

Megatron's own configuration says what is offloaded (`fine_grained_activation_offloading`, `offload_modules`); `install`
says how, before the model is built.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nemo_rl_offload.adapters.megatron_core.installation import install as install

__all__ = ["install"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.installation"), name)  # a module named `install` would hide the function
