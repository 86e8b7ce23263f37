"""What a process that measures sets up."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def deterministic() -> Iterator[None]:
    """Operations without a reproducible form raise; what is built inside asks for reproducible kernels."""
    torch.use_deterministic_algorithms(True)  # flash attention's backward ignores a mere wish (`warn_only`)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
