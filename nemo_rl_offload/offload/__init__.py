"""The activation offload engine: saved tensors wait for their backward in host memory. It needs torch
alone."""

import warnings
from importlib import import_module
from typing import Any

_EXPORTS = {
    "OffloadEngine": "engine",
    "Region": "engine",
    "OffloadStats": "stats",
    "ModuleStats": "stats",
    "HostBackend": "backends.host",
    "CudaBackend": "backends.cuda",
}
_MOVED = {
    "ActivationOffload": "nemo_rl_offload.adapters.torch_modules",
    "offload_activations": "nemo_rl_offload.adapters.torch_modules",
    "OffloadCallback": "nemo_rl_offload.adapters.hf_trainer",
}

__all__ = list(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name in _MOVED:
        warnings.warn(f"{__name__}.{name} has moved to {_MOVED[name]}", DeprecationWarning, stacklevel=2)
        globals()[name] = value = getattr(import_module(_MOVED[name]), name)  # `from ... import` asks twice
        return value
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_EXPORTS[name]}"), name)
