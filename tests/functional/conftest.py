import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ranks import Ranks


@pytest.fixture
def no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU tells no times, as the CPU: the engine does not learn which groups have no time to leave."""
    monkeypatch.setattr("nemo_rl_offload.offload.backends.cuda.CudaBackend.mark", lambda self: None)


@pytest.fixture(scope="session")
def any_device_process_group() -> Iterator[None]:
    """A group of one rank in this process, split for Megatron: on a GPU where there is one, else on the CPU."""
    import torch
    import torch.distributed as dist
    from models import make_policy

    from nemo_rl_offload.megatron.runtime.cpu import install_cpu_support

    if not install_cpu_support():
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True)
    from megatron.core import parallel_state

    from nemo_rl_offload.megatron.build.model import init_process_groups

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "RANK", "0")
        patch.setitem(os.environ, "WORLD_SIZE", "1")
        init_process_groups(make_policy(), seed=1)
    yield
    torch.set_num_threads(num_threads)
    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


@pytest.fixture(scope="session")
def megatron_process_group(request: pytest.FixtureRequest) -> None:
    """The same for tests that compare with the CPU's arithmetic."""
    import torch

    if torch.cuda.is_available():
        pytest.skip("compares with the CPU's arithmetic, in a process without CUDA")
    request.getfixturevalue("any_device_process_group")


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """The group of a number of ranks, which all tests share; after a failure a new one."""
    groups: dict[int, Ranks] = {}

    def group(world_size: int) -> Ranks:
        if world_size in groups and not groups[world_size].is_whole:
            groups.pop(world_size).close()
        if world_size not in groups:
            groups[world_size] = Ranks(world_size)
        return groups[world_size]

    yield group
    for each in groups.values():
        each.close()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny random model of a family; made once."""
    from models import write_model

    folders: dict[object, Path] = {}

    def folder(family: str, **shape: int) -> Path:
        key = family, *shape.items()
        if key not in folders:
            folders[key] = write_model(family, tmp_path_factory.mktemp(family), **shape)
        return folders[key]

    return folder
