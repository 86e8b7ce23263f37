"""Megatron-Core's offload interface on this project's engine.

`install` puts the engine in the place of Megatron's in any program, behind Megatron's own flags; `uninstall` ends it.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nemo_rl_offload.adapters.megatron_core.standalone import Installed as Installed
    from nemo_rl_offload.adapters.megatron_core.standalone import install as install
    from nemo_rl_offload.adapters.megatron_core.standalone import installed as installed
    from nemo_rl_offload.adapters.megatron_core.standalone import uninstall as uninstall

__all__ = ["Installed", "install", "installed", "uninstall"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.standalone"), name)
