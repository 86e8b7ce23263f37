"""Host memory for one rank, and the engine that gets it."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.megatron import offload_setup
from nemo_rl_offload.megatron.offload_interface import OffloadInterface, use_engine
from nemo_rl_offload.megatron.offload_setup import host_memory_budget_bytes, install_offloading


@pytest.mark.parametrize(("ranks", "expected"), [(None, 500), ("1", 500), ("4", 125)])
def test_a_share_is_divided_by_the_ranks(ranks: str | None, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload_setup, "free_host_bytes", lambda: 1000)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if ranks is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert host_memory_budget_bytes(0.5) == expected


def test_a_size_is_for_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert host_memory_budget_bytes("3MiB") == 3 << 20
    with pytest.raises(ConfigError, match="not a size"):
        host_memory_budget_bytes("much")


@pytest.fixture
def no_engine_afterwards() -> Iterator[None]:
    yield
    use_engine(None)


@pytest.mark.usefixtures("process_group", "no_engine_afterwards")
def test_the_engine_follows_the_section(make_policy: Callable[..., Any]) -> None:
    modules = "offload_modules=[core_attn,mlp_norm]"
    engine = install_offloading(
        make_policy(modules, "activation_offload.host_memory_budget=3MiB", "min_offloaded_tensor_size=9")
    )
    assert engine is not None
    assert OffloadInterface.engine is engine
    assert OffloadInterface.modules == {"core_attn", "mlp_norm"}
    assert engine._arena._budget_bytes == 3 << 20
    assert engine._min_tensor_elements == 9
    assert install_offloading(make_policy(modules, "fine_grained_activation_offloading=false")) is None
    assert OffloadInterface.engine is None
    engine.close()
