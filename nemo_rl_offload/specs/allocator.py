"""Settings of torch's allocator of device memory, which it reads from a variable of the environment.

Segments that expand are pieces of address space to which pages are mapped as tensors need them, so that little lies
unused between tensors of changing sizes. Without them each tensor that fits no free piece takes a new one. Workers have
them where the user says nothing of the allocator. Memory from such segments is handed to other processes by file
descriptors, which not all kernels, containers and cards allow: what is handed over is allocated without. Beside CUDA
graphs of layers they have not been tried here, and are not the default.
"""

import os
import re
from collections.abc import Mapping

VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""torch 2.11 reads the first that is set, if to nothing."""
EXPANDABLE = "expandable_segments:True"
_EXPANDABLE = re.compile(r"(expandable_segments\s*:\s*)True")


def allocator_settings(environment: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """The variable that is read, and what is there."""
    found = ((name, environment[name]) for name in VARIABLES if name in environment)
    return next(found, (VARIABLES[0], ""))


def expands(settings: str) -> bool:
    """Whether segments do by these settings."""
    return _EXPANDABLE.search(settings) is not None


def without_expanding(settings: str) -> str:
    """The same but for that."""
    return _EXPANDABLE.sub(r"\1False", settings)
