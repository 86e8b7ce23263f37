"""Processes that are the ranks of one group: over gloo, forked from a server that has imported Megatron once, or over
NCCL, each started anew with a GPU of its own."""

import gc
import importlib
import multiprocessing
import os
import socket
import sys
import traceback
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from typing import TYPE_CHECKING, Any

import numpy as np
from patience import PATIENCE_S

if TYPE_CHECKING:
    from numpy.typing import NDArray

CHOICES_OF_ATTENTION = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")
"""Where Megatron-Core keeps Transformer Engine's kernel, and refuses that of a later model."""


class Ranks:
    """`world_size` processes that call functions of the module `rank_work` at the same time, one after another."""

    def __init__(self, world_size: int, *, on_gpus: bool = False) -> None:
        context: SpawnContext | ForkServerContext
        if on_gpus:
            context = multiprocessing.get_context("spawn")
        else:
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(["rank_preload"])
        os.environ.pop("PYTEST_CURRENT_TEST", None)  # other tests use them too
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))  # where the server looks for it
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.is_whole = True
        """No call has failed."""
        self._pipes, self._processes = [], []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, world_size, port, theirs, on_gpus), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: str, *args: Any, **how: Any) -> list[Any]:
        """Return what `rank_work.function(*args, **how)` returns on each rank."""
        self.is_whole = False
        for pipe in self._pipes:
            pipe.send((function, args, how))
        results = []
        for rank, pipe in enumerate(self._pipes):
            assert pipe.poll(PATIENCE_S), f"rank {rank} hangs in {function}{args}"
            try:
                is_done, result = pipe.recv()
            except EOFError:
                self._processes[rank].join()
                raise AssertionError(f"rank {rank} ended with {self._processes[rank].exitcode}") from None
            assert is_done, f"rank {rank}: {result}"
            results.append(result)
        self.is_whole = True
        return results

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()


def _serve(rank: int, world_size: int, port: int, pipe: Connection, on_gpus: bool) -> None:
    if on_gpus:
        devices = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        own = devices[rank] if rank < len(devices) and devices[rank] else str(rank)
        # Transformer Engine multiplies float32 in TF32 otherwise, whose last bit is 2^-10.
        exact = {"NVIDIA_TF32_OVERRIDE": "0"}
        repeated = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
        os.environ |= {"CUDA_VISIBLE_DEVICES": own, **exact, **repeated}
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    importlib.import_module("rank_preload")
    if on_gpus:
        # Some operators of experts, as sums of integers, have one form alone, which torch refuses otherwise.
        importlib.import_module("torch").use_deterministic_algorithms(True, warn_only=True)
    work = importlib.import_module("rank_work")
    gc.freeze()  # what a rank collects between two calls is its own, not all that was imported
    while True:
        function, args, how = pipe.recv()
        for name in CHOICES_OF_ATTENTION:
            os.environ.pop(name, None)
        try:
            pipe.send((True, getattr(work, function)(*args, **how)))
        except Exception:  # noqa: BLE001 - the test shows it
            pipe.send((False, traceback.format_exc()))


def relative_error(values: dict[str, "NDArray[np.float32]"], reference: dict[str, "NDArray[np.float32]"]) -> float:
    """Largest of any tensor; one that is all but zero counts by the norm of all."""
    assert values.keys() == reference.keys()
    total = sum(float(np.square(array, dtype=np.float64).sum()) for array in reference.values()) ** 0.5
    assert total > 0
    return max(
        float(np.linalg.norm(values[name] - array) / max(np.linalg.norm(array), 1e-3 * total))
        for name, array in reference.items()
    )
