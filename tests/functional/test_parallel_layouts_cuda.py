"""Parallel layouts over NCCL: Megatron's layers in plain torch and Transformer Engine's train as one rank does."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from models import offload
from ranks import Ranks, relative_error
from test_parallel_layouts import LAYOUTS, MODULES, SETTINGS, SGD, STEPS, assert_same_bits

if TYPE_CHECKING:
    from rank_work import Outcome

ON_GPUS = torch.cuda.device_count() >= 2
HAS_TRANSFORMER_ENGINE = importlib.util.find_spec("transformer_engine") is not None
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not ON_GPUS, reason="needs two CUDA devices")]

SHAPE = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
IMPLEMENTATIONS = {
    "torch": (),
    "unfused": ("transformer_impl=transformer_engine", "attention_backend=unfused"),
    "fused": ("transformer_impl=transformer_engine", "attention_backend=fused"),
}
TOLERANCE = 3e-5
"""Of float32, as on CPUs: sums in another order, and two updates."""
EIGHT_BITS = 3e-2
"""Of bfloat16: eight bits, times what three steps make of them."""
FLOAT32 = [
    *(("qwen2", layout) for layout in ("dp2", "tp2-sp", "pp2", "pp2-vpp2", "cp2")),
    *(("qwen3_moe", layout) for layout in ("ep2", "tp2-sp-ep2", "pp2")),
    *(("deepseek_v3_mtp", layout) for layout in ("tp2-sp", "pp2")),
]
NOT_UNFUSED = ("cp2",)
"""Transformer Engine divides a sequence in its kernels of 16 bits alone."""
BFLOAT16 = [("qwen2", "cp2", "sequence_packing"), ("qwen3_moe", "cp2", "sequence_packing"), ("qwen2", "cp2", "plain")]
OUTSIDE_OF_TRANSFORMER_ENGINE = ("attn_norm", "mlp_norm", "mlp_act", "moe_act")
"""Its layers do these within the product that follows, or save other tensors."""
Train = Callable[..., "list[Outcome]"]


@pytest.fixture(scope="module")
def ranks_on_gpus() -> Iterator[Callable[[int], Ranks]]:
    groups: dict[int, Ranks] = {}

    def group(world_size: int) -> Ranks:
        if world_size in groups and not groups[world_size].is_whole:
            groups.pop(world_size).close()
        if world_size not in groups:
            groups[world_size] = Ranks(world_size, on_gpus=True)
        return groups[world_size]

    yield group
    for each in groups.values():
        each.close()


@pytest.fixture(scope="module")
def train(ranks_on_gpus: Callable[[int], Ranks], tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Three steps in a layout, each combination once; the outcomes of all ranks."""
    folders: dict[str, Path] = {}
    outcomes: dict[tuple[Any, ...], list[Outcome]] = {}

    def train_in(
        family: str, layout: str, implementation: str, *settings: str, modules: tuple[str, ...] = ()
    ) -> list[Outcome]:
        if family not in folders:
            (folders[family],) = ranks_on_gpus(1).run("write", family, tmp_path_factory.mktemp(family), **SHAPE)
        key = (family, layout, implementation, settings, modules)
        if key not in outcomes:
            chosen = tuple(text for setting in settings for text in SETTINGS[setting])
            overrides = (*SGD, *LAYOUTS[layout][1], *IMPLEMENTATIONS[implementation], *chosen, *offload(modules))
            group = ranks_on_gpus(LAYOUTS[layout][0])
            outcomes[key] = group.run("train", folders[family], overrides, STEPS)
        return outcomes[key]

    return train_in


def modules_of(family: str, implementation: str) -> tuple[str, ...]:
    """What layers of this implementation have to offload."""
    inside = OUTSIDE_OF_TRANSFORMER_ENGINE if implementation != "torch" else ()
    return tuple(name for name in MODULES[family] if name not in inside)


def skip_without(implementation: str) -> None:
    if implementation != "torch" and not HAS_TRANSFORMER_ENGINE:
        pytest.skip("needs Transformer Engine")


def assert_alike(outcomes: list[Outcome], one: Outcome, tolerance: float) -> None:
    for expected, metrics in zip(one.metrics, outcomes[-1].metrics, strict=True):
        assert metrics == pytest.approx(expected, rel=tolerance, abs=1e-7)
    assert relative_error(outcomes[0].gradients, one.gradients) < tolerance
    assert relative_error(outcomes[0].weights, one.weights) < tolerance


@pytest.mark.parametrize("implementation", ["torch", "unfused"])
@pytest.mark.parametrize(("family", "layout"), FLOAT32)
def test_a_layout_trains_as_one_rank_does(family: str, layout: str, implementation: str, train: Train) -> None:
    skip_without(implementation)
    if implementation == "unfused" and layout in NOT_UNFUSED:
        pytest.skip("Transformer Engine divides sequences in 16 bits alone")
    (one,) = train(family, "one", "torch")
    assert_alike(train(family, layout, implementation), one, TOLERANCE)


@pytest.mark.parametrize("implementation", ["torch", "unfused"])
@pytest.mark.parametrize(("family", "layout"), FLOAT32)
def test_offloading_changes_no_bit(family: str, layout: str, implementation: str, train: Train) -> None:
    skip_without(implementation)
    if implementation == "unfused" and layout in NOT_UNFUSED:
        pytest.skip("Transformer Engine divides sequences in 16 bits alone")
    modules = modules_of(family, implementation)
    outcomes = train(family, layout, implementation, modules=modules)
    assert_same_bits(outcomes, train(family, layout, implementation))
    for name in modules:
        assert sum(outcome.bytes_out.get(name, 0) for outcome in outcomes) > 0, name


@pytest.mark.parametrize(("family", "layout"), [("qwen2", "cp2"), ("qwen3_moe", "cp2"), ("qwen2", "dp2")])
def test_packs_train_as_rows_do(family: str, layout: str, train: Train) -> None:
    (one,) = train(family, "one", "torch")
    outcomes = train(family, layout, "torch", "sequence_packing")
    assert_alike(outcomes, one, TOLERANCE)
    modules = modules_of(family, "torch")
    assert_same_bits(train(family, layout, "torch", "sequence_packing", modules=modules), outcomes)


@pytest.mark.parametrize(("family", "layout", "setting"), BFLOAT16)
def test_transformer_engines_kernels_divide_sequences_and_packs(
    family: str, layout: str, setting: str, train: Train
) -> None:
    skip_without("fused")
    (one,) = train(family, "one", "torch")
    outcomes = train(family, layout, "fused", "bfloat16", setting)
    assert_alike(outcomes, one, EIGHT_BITS)
    modules = modules_of(family, "fused")
    assert_same_bits(train(family, layout, "fused", "bfloat16", setting, modules=modules), outcomes)
