"""Settings of torch's allocator of device memory, which it reads from a variable of the environment.

Segments that expand are pieces of address space to which pages are mapped as tensors need them, so that little lies
unused between tensors of changing sizes. Without them each tensor that fits no free piece takes a new one. Workers have
them where the user says nothing of the allocator. Memory from such segments is handed to other processes by file
descriptors, which not all kernels, containers and cards allow: what is handed over is allocated without. Where CUDA
graphs are captured, segments do not expand by default: beside them Megatron-Core wants NCCL_GRAPH_REGISTER=0.
"""

import os
from collections.abc import Mapping

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The first that is set is read."""
EXPANDABLE = "expandable_segments:True"
FIXED = "expandable_segments:False"


def allocator_settings(environment: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """The variable that is read, and what is there."""
    found = ((name, environment[name]) for name in VARIABLES if environment.get(name))
    return next(found, (VARIABLES[-1], ""))
