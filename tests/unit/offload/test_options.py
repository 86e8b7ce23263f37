"""What an engine is told, and the engine that comes of it."""

from typing import Any

import pytest
import torch

from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.offload import HostBackend, OffloadEngine
from nemo_rl_offload.offload.arena import HostArena
from nemo_rl_offload.offload.memory_budget import Measured
from nemo_rl_offload.offload.options import OffloadOptions, build_engine
from nemo_rl_offload.offload.selection import Selection


def built(**options: Any) -> OffloadEngine:
    return build_engine(
        OffloadOptions(**{"modules": ["core_attn"], "host_memory_budget_bytes": 1 << 20, **options}), HostBackend()
    )


@pytest.mark.parametrize(
    ("option", "path", "value"),
    [
        ("host_memory_budget_bytes", "_arena._budget_bytes", 3 << 20),
        ("min_tensor_bytes", "_min_tensor_bytes", 7),
        ("min_tensor_elements", "_min_tensor_elements", 9),
        ("fraction", "_selection.fraction", 0.25),
        ("kept_bytes_per_step", "_selection.kept_bytes_per_step", 1000),
        ("max_inflight_groups", "_copies._max_inflight_groups", 2),
        ("max_inflight_bytes", "_copies._max_inflight_bytes", 1 << 16),
    ],
)
def test_an_option_reaches_its_part(option: str, path: str, value: float) -> None:
    engine: Any = built(**{option: value})
    for name in path.split("."):
        engine = getattr(engine, name)
    assert engine == value


def test_what_is_not_said() -> None:
    engine = built()
    assert engine._auto is None
    assert engine._selection == Selection()
    assert engine._copies._max_inflight_groups is None
    assert engine._min_tensor_bytes == 1 << 20
    assert engine._min_tensor_elements == 0
    assert not engine._steps_are_told


def test_auto_has_both_budgets_and_asks_the_other_ranks() -> None:
    asked = []

    def of_others(measured: Measured) -> Measured:
        asked.append(measured)
        return measured

    options = OffloadOptions(modules="auto", gpu_memory_budget_bytes=5 << 20, host_memory_budget_bytes=3 << 20)
    engine = build_engine(options, HostBackend(), reduce_max_over_ranks=of_others, steps_are_told=True)
    auto = engine._auto
    assert auto is not None
    assert (auto._budget_bytes, auto._host_budget_bytes) == (5 << 20, 3 << 20)
    assert engine._steps_are_told
    auto.begin()
    engine.end_step()
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"modules": "core_attn"}, r"modules='core_attn': give a list of names, like \['core_attn'\], or 'auto'"),
        ({"modules": "auto"}, "modules='auto' and gpu_memory_budget_bytes need each other"),
        ({"gpu_memory_budget_bytes": 1 << 30}, "modules='auto' and gpu_memory_budget_bytes need each other"),
        ({"host_memory_budget_bytes": "32GiB"}, "host_memory_budget_bytes='32GiB': give a whole number from 0 on"),
        ({"min_tensor_bytes": -1}, "min_tensor_bytes=-1: give a whole number"),
        ({"fraction": 1.5}, "fraction=1.5: give a share from 0 to 1"),
    ],
)
def test_mistakes_are_told(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        built(**options)


def test_an_arena_that_others_use_too_outlives_the_engine() -> None:
    arena = HostArena(HostBackend(), 8 << 20)
    assert arena.hold(6 << 20) is not None
    options = OffloadOptions(modules=["core_attn"], host_memory_budget_bytes=8 << 20, min_tensor_bytes=0)
    engine = build_engine(options, arena.backend, arena=arena)
    weight = torch.ones(1 << 19, requires_grad=True)
    region = engine.region("core_attn", 0)
    with region:
        result = (weight * weight).exp()  # saves 2 MiB twice
    engine.commit(region, result)
    assert (engine.stats().host_bytes, engine.stats().denied_bytes) == (2 << 20, 2 << 20)
    result.sum().backward()
    del result, region
    engine.close()
    assert arena.held_bytes == 6 << 20
    assert arena.used_bytes == 0
    assert arena.reserve(1 << 20) is not None
