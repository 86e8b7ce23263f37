"""What tests start to run on the CPU, command lines or Ray and its workers, finds no GPU on a machine that has one."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from example_runs import python_path

from nemo_rl_offload.cluster import worker_group
from nemo_rl_offload.cluster.virtual_cluster import VirtualCluster
from nemo_rl_offload.config.loader import PROJECT_ROOT

_HIDING = Path(__file__).parent / "no_gpu"


def cpu_environment() -> dict[str, str]:
    """Variables that hide the GPUs, and Transformer Engine, which needs one, and lead to this project."""
    return {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": python_path(PROJECT_ROOT, _HIDING)}


@contextmanager
def without_gpus() -> Iterator[None]:
    """For starting Ray and no longer: a process that looks for a GPU in it finds none ever after."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        yield


@contextmanager
def cpu_cluster(num_workers: int) -> Iterator[VirtualCluster]:
    """Slots of a Ray that is started here; until the end, workers do not find Transformer Engine either."""
    import_paths = worker_group._own_import_paths
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker_group, "_own_import_paths", lambda: [str(_HIDING), *import_paths()])
        with without_gpus():
            cluster = VirtualCluster(num_nodes=1, gpus_per_node=num_workers)
        with cluster:
            assert cluster.device == "cpu"
            yield cluster
