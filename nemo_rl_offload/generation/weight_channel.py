"""Weights on their way from the first rank that trains to engines on other GPUs: NCCL's broadcast, bucket by bucket.

Ray's store would take them through the host's memory four times; 3 GB took 4.2 s on two H200s. What a bucket's bytes
are goes by the calls of the driver, so that nothing is unpickled that comes from a port. The group belongs to these
processes alone, beside the default groups that each side has already.

Rejected: torch's `init_process_group`, of which a process has one. CUDA's handles, which the processes beside a rank
open: Ray shows each worker its own GPU alone. The limit: both sides end and start as one, as they do with a run.
"""

import os
import socket
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_rl_offload.cluster.background import in_background
from nemo_rl_offload.megatron.runtime.rendezvous import TIMEOUT, listen

SENDER = 0


class WeightChannel:
    """One end of it, connected. `rank` 0 sends, the others receive."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        kind: Any = dist.ProcessGroupNCCL if self._device == "cuda" else dist.ProcessGroupGloo
        self._group = kind(store, rank, size, TIMEOUT)
        self._sending: Any = None
        self.receive(torch.zeros(1, dtype=torch.uint8, device=self._device))  # NCCL connects with its first call

    def send(self, buffer: Tensor) -> None:
        """Begin to send a buffer, uint8 [bytes], which is to stay as it is until `wait`."""
        self.wait()
        self._sending = self._group.broadcast(buffer, SENDER)

    def wait(self) -> None:
        """What comes next on the current stream comes after what is being sent."""
        if self._sending is not None:
            self._sending.wait()
            self._sending = None

    def receive(self, buffer: Tensor) -> None:
        """Fill a buffer, uint8 [bytes], for what comes next on the current stream."""
        self._group.broadcast(buffer, SENDER).wait()


class OpenChannel:
    """The sending end, which waits for the others in a thread, and the address where they find it.

    That is this worker's (MASTER_ADDR) and no other.
    """

    def __init__(self, num_receivers: int) -> None:
        host, size = os.environ["MASTER_ADDR"], num_receivers + 1
        listener = listen(host, 0)
        self.address = host, _port(listener)
        store = dist.TCPStore(  # type: ignore[attr-defined]
            *self.address, size, True, TIMEOUT, wait_for_workers=False, master_listen_fd=listener
        )
        self._connected = in_background(partial(WeightChannel, store, SENDER, size), "weight channel")

    @property
    def channel(self) -> WeightChannel:
        """Once all receivers have come."""
        return self._connected.result()


def join_channel(address: tuple[str, int], number: int, num_receivers: int) -> WeightChannel:
    """The end of receiver `number`, from 0; when all others and the sender are there."""
    size = num_receivers + 1
    store = dist.TCPStore(*address, size, False, TIMEOUT, wait_for_workers=False)  # type: ignore[attr-defined]
    return WeightChannel(store, number + 1, size)


def _port(listener: int) -> int:
    with socket.socket(fileno=os.dup(listener)) as each:
        port: int = each.getsockname()[1]
        return port
