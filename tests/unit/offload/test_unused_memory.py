"""What nobody needed of a device, by patched counters."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nemo_rl_offload.offload import CudaBackend
from nemo_rl_offload.offload.overlap import FRAGMENTATION
from nemo_rl_offload.units import GIB


@pytest.mark.parametrize(
    ("free", "kept", "peak", "unused"),
    [
        (70, 10, 60, 20),  # of 100: 20 are other programs', 10 lie in the cache now
        (10, 70, 60, 20),  # nobody has emptied it
        (70, 10, 85, -5),
        (100, 0, 0, None),  # PYTORCH_NO_CUDA_MEMORY_CACHING
    ],
)
def test_what_lies_in_the_cache_is_unused_and_what_the_peak_took_is_not(
    monkeypatch: pytest.MonkeyPatch, free: int, kept: int, peak: int, unused: int | None
) -> None:
    counters = {"reserved_bytes.all.current": kept * GIB, "allocated_bytes.all.peak": peak * GIB}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free * GIB, 100 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: counters)
    backend: Any = SimpleNamespace(device=torch.device("cuda", 0))
    expected = 0 if unused is None else unused * GIB - int(100 * GIB * FRAGMENTATION)
    assert CudaBackend.unused_bytes(backend) == expected
