"""The activation offload engine: saved tensors wait for their backward in host memory. It needs torch
alone."""

from importlib import import_module
from typing import Any

_EXPORTS = {
    "OffloadEngine": "engine",
    "Region": "engine",
    "OffloadStats": "stats",
    "ModuleStats": "stats",
    "HostBackend": "backends.host",
    "CudaBackend": "backends.cuda",
    "ActivationOffload": "torch_modules",
    "offload_activations": "torch_modules",
    "OffloadCallback": "trainer",
}

__all__ = list(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_EXPORTS[name]}"), name)
