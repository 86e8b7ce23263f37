"""E1's ways differ in copies and engine alone."""

from collections.abc import Iterator
from typing import Any, cast

import pytest
from constants import NUM_AHEAD
from deepseek_stage import MODULES, Stage, make_policy
from megatron.core.transformer.moe import token_dispatcher
from torch import Tensor

from nemo_rl_offload.adapters.megatron_core.interface import OffloadInterface


@pytest.fixture
def stage(megatron_process_group: None) -> Iterator[Stage]:
    stage = Stage(make_policy(MODULES, 32, "torch"), 1, 32, NUM_AHEAD + 1)
    yield stage
    stage.close()


@pytest.mark.slow
def test_the_routers_answers_pass_bare_copies_as_they_pass_an_engines(stage: Stage) -> None:
    original = token_dispatcher.maybe_move_tensor_to_cpu
    stage.use(None, cast(Any, "copies"))
    assert token_dispatcher.maybe_move_tensor_to_cpu is not original
    stage.use(None)
    assert token_dispatcher.maybe_move_tensor_to_cpu is original
    assert stage.bare_copies is None


@pytest.mark.slow
def test_every_region_is_of_the_engine_in_use(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: set[str] = set()

    class Megatrons(OffloadInterface):
        def __init__(self, offload: bool, tensor: Tensor, name: str) -> None:
            super().__init__(False, tensor, name)
            opened.update([name] if offload else [])

    monkeypatch.setattr("megatrons_engine.MEGATRONS_INTERFACE", Megatrons)
    monkeypatch.setattr("megatrons_engine.have_transformer_engine", lambda: True)
    monkeypatch.setenv("NVTE_CPU_OFFLOAD_V1", "1")
    stage.use_megatrons()
    stage.step()
    assert opened == set(MODULES)
    opened.clear()
    stage.use(stage.engine)
    stage.step()
    assert opened == set()
    assert stage.engine.stats().per_module.keys() == set(MODULES)
