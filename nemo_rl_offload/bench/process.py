"""What a process that measures sets up."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def be_the_only_rank() -> None:
    """Set the environment by which `init_process_groups` makes a group of this process alone."""
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}


@contextmanager
def deterministic() -> Iterator[None]:
    """Operations without a reproducible form raise; what is built inside asks for reproducible kernels."""
    torch.use_deterministic_algorithms(True)  # flash attention's backward ignores a mere wish (`warn_only`)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
