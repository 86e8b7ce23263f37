"""Megatron-Core's own offload engine where Megatron's modules look theirs up, in turn with this project's."""

import os

from megatron.core.pipeline_parallel import fine_grained_activation_offload as megatron_offload

from nemo_rl_offload.adapters.megatron_core.interface import MEGATRONS_INTERFACE, bind_interface
from nemo_rl_offload.megatron.build.bridge import have_transformer_engine


def bind_megatrons_engine() -> None:
    """Let Megatron's modules use Megatron's engine until `use_engine` is called. Raises ImportError where it cannot."""
    if not have_transformer_engine():
        raise ImportError("Megatron-Core's engine needs Transformer Engine")
    assert os.environ.get("NVTE_CPU_OFFLOAD_V1") == "1", "Megatron-Core's engine needs it"
    bind_interface(MEGATRONS_INTERFACE)


def forget_megatrons_steps() -> None:
    """Let Megatron's engine begin anew: it finds out in a first step what there is to offload."""
    megatron_offload.PipelineOffloadManager.reset_instance()
