from collections.abc import Callable

import pytest

from nemo_rl_offload.offload import HostBackend, OffloadEngine


@pytest.fixture
def make_engine() -> Callable[..., OffloadEngine]:
    def make(**changes: int) -> OffloadEngine:
        settings = {"host_memory_budget_bytes": 64 << 20, "min_tensor_bytes": 0, **changes}
        return OffloadEngine(HostBackend(), **settings)

    return make
