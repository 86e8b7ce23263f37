"""Megatron-Core's own offload engine where Megatron's modules look theirs up, in turn with this project's.

Import this before an engine of this project is put in its place.
"""

import os
import sys
from typing import Any

from megatron.core.pipeline_parallel import fine_grained_activation_offload as megatron_offload

from nemo_rl_offload.megatron.bridge import have_transformer_engine

_INTERFACE = "FineGrainedActivationOffloadingInterface"
_MEGATRONS = getattr(megatron_offload, _INTERFACE)
assert _MEGATRONS.__module__ == megatron_offload.__name__, "import this before an engine is put in its place"


def bound_interface() -> Any:
    """The class that Megatron's modules use now."""
    return getattr(megatron_offload, _INTERFACE)


def bind_megatrons_engine() -> None:
    """Let Megatron's modules use Megatron's engine until `use_engine` is called. Raises ImportError where it cannot."""
    if not have_transformer_engine():
        raise ImportError("Megatron-Core's engine needs Transformer Engine")
    assert os.environ.get("NVTE_CPU_OFFLOAD_V1") == "1", "Megatron-Core's engine needs it"
    current = bound_interface()
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.") and module is not None:
            for attribute in [key for key, value in vars(module).items() if value is current]:
                setattr(module, attribute, _MEGATRONS)


def forget_megatrons_steps() -> None:
    """Let Megatron's engine begin anew: it finds out in a first step what there is to offload."""
    megatron_offload.PipelineOffloadManager.reset_instance()
