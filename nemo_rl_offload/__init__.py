"""Post-train larger models on the GPUs you have; see README.md."""

from importlib import import_module
from typing import Any

_EXPORTS = {
    "offload_activations": "adapters.torch_modules",
    "OffloadCallback": "adapters.hf_trainer",
    "OffloadOptions": "offload.options",
}

__all__ = list(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_EXPORTS[name]}"), name)
