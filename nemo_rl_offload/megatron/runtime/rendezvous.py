"""Where workers meet: at the first one's address, and at no other.

The first worker has a store of torch's there, through which the others find each other. Whoever starts the workers says
where that is: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT of the environment.
"""

import os
import socket
from datetime import timedelta

import torch.distributed as dist

from nemo_rl_offload.errors import WorkerError

TIMEOUT = timedelta(minutes=30)


def join(backend: str, num_together: int | None = None) -> None:
    """Make the process group of all workers, or one of each `num_together` neighbours.

    Raises:
        WorkerError: the port where they meet is taken.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    size = num_together or world_size
    if size == 1:
        join_alone(backend)
        return
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    group, rank_of_group = divmod(rank, size)
    try:
        # torch's own `env://` would take writes from every interface.
        listener = listen(host, port) if rank == 0 else None
        of_all = dist.TCPStore(  # type: ignore[attr-defined]
            host, port, world_size, rank == 0, TIMEOUT, master_listen_fd=listener
        )
        store = dist.PrefixStore(str(group), of_all) if size < world_size else of_all  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=rank_of_group, world_size=size, timeout=TIMEOUT)
    except (dist.DistNetworkError, OSError) as error:
        raise WorkerError(
            f"the workers cannot meet at {host}:{port}: {str(error).splitlines()[0]} Another process may have taken "
            "the port since it was found free: start the run again (fault_tolerance.max_restarts does so by itself)."
        ) from error


def join_alone(backend: str) -> None:
    """Make a process group of this process, which meets nobody: no port to lose to another process.

    gloo opens one nevertheless, and where the environment (GLOO_SOCKET_IFNAME) does not say, on loopback.
    """
    if "lo" in (name for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]


def listen(host: str, port: int) -> int:
    """A socket's file descriptor, which belongs to the caller."""
    (family, _, _, _, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return socket.create_server(address, family=family).detach()
