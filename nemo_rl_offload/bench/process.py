"""What a process that measures sets up."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def be_the_only_rank() -> None:
    """Set the environment by which `torch.distributed` starts a group of this process alone, at a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0", "WORLD_SIZE": "1"}


@contextmanager
def deterministic() -> Iterator[None]:
    """Operations without a reproducible form raise; what is built inside asks for reproducible kernels."""
    torch.use_deterministic_algorithms(True)  # flash attention's backward ignores a mere wish (`warn_only`)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
