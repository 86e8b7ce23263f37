"""The engine that the policy's offloading section makes."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nemo_rl_offload.adapters.megatron_core.interface import OffloadInterface, use_engine
from nemo_rl_offload.megatron.build import offload as offload_setup
from nemo_rl_offload.megatron.build.offload import install_offloading
from nemo_rl_offload.offload.selection import Selection


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
    assert engine._selection == Selection()
    assert engine._copies._max_inflight_groups is None
    assert install_offloading(make_policy(modules, "fine_grained_activation_offloading=false")) is None
    assert OffloadInterface.engine is None
    engine.close()


@pytest.mark.usefixtures("process_group", "no_engine_afterwards")
@pytest.mark.parametrize(("pipeline_rank", "kept_bytes"), [(0, 0), (3, 3000)])
def test_megatrons_knobs_reach_the_engine(
    make_policy: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, pipeline_rank: int, kept_bytes: int
) -> None:
    monkeypatch.setattr(offload_setup.parallel_state, "get_pipeline_model_parallel_rank", lambda: pipeline_rank)
    knobs = (
        "activation_offload_fraction=0.25",
        "delta_offload_bytes_across_pp_ranks=1000",
        "fine_grained_offloading_max_inflight_offloads=2",
    )
    engine = install_offloading(make_policy(*knobs))
    assert engine is not None
    assert engine._selection == Selection(fraction=0.25, kept_bytes_per_step=kept_bytes)
    assert engine._copies._max_inflight_groups == 2
    engine.close()
