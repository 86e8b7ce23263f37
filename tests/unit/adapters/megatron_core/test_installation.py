"""The engine in Megatron's layers by one call, without a policy."""

from collections.abc import Iterator

import pytest
from megatron.core.pipeline_parallel import fine_grained_activation_offload as megatron_offload

from nemo_rl_offload import OffloadOptions
from nemo_rl_offload.adapters import megatron_core
from nemo_rl_offload.adapters.megatron_core.interface import OffloadInterface, use_engine
from nemo_rl_offload.specs.offload_modules import NATIVE_MODULES


@pytest.fixture(autouse=True)
def _no_engine_afterwards() -> Iterator[None]:
    yield
    use_engine(None)


def test_megatrons_layers_use_the_engine_of_the_options() -> None:
    engine = megatron_core.install(OffloadOptions(modules=["core_attn", "mlp_norm"], host_memory_budget_bytes=3 << 20))
    assert engine is not None
    assert megatron_offload.FineGrainedActivationOffloadingInterface is OffloadInterface
    assert OffloadInterface.engine is engine
    assert OffloadInterface.modules == {"core_attn", "mlp_norm"}
    assert engine._arena._budget_bytes == 3 << 20
    assert engine._steps_are_told
    assert megatron_core.install(None) is None
    assert OffloadInterface.engine is None
    engine.close()


def test_auto_may_choose_from_all_modules() -> None:
    engine = megatron_core.install(
        OffloadOptions(modules="auto", gpu_memory_budget_bytes=1 << 30, host_memory_budget_bytes=3 << 20)
    )
    assert engine is not None
    assert OffloadInterface.modules == set(NATIVE_MODULES)
    engine.close()
