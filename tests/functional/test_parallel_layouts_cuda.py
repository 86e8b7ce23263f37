"""Parallel layouts over NCCL train as one rank does, and offloading changes no bit in any of them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from models import offload
from ranks import Ranks, relative_error
from test_parallel_layouts import LAYOUTS, MODULES, SETTINGS, SGD, STEPS, TOLERANCE, assert_same_bits
from test_transformer_engine import MODULES as TRANSFORMER_ENGINES_MODULES

if TYPE_CHECKING:
    from rank_work import Outcome

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
needs_transformer_engine = pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is None, reason="needs Transformer Engine"
)

SHAPE = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}
FEWER_KEYS = {"qwen2": {"num_key_value_heads": 2}, "qwen3_moe": {"num_key_value_heads": 2}}
RECURRENT = ("nemotron_h", "qwen3_5_text")
"""Families with sizes of their own."""
IMPLEMENTATIONS = {
    "torch": ("transformer_impl=torch",),
    "transformer_engine": ("transformer_impl=transformer_engine", "attention_backend=unfused"),
}
CASES = [
    *(("qwen2", "torch", layout) for layout in ("dp2", "tp2-sp", "pp2", "pp2-vpp2", "cp2")),
    *(("qwen3_moe", "torch", layout) for layout in ("ep2", "ep2-allgather", "tp2-sp-ep2", "pp2", "cp2-ep2")),
    *(("qwen3_moe", "torch", layout) for layout in ("etp2", "etp2-allgather", "tp2-sp-etp2")),
    *(("deepseek_v3_mtp", "torch", layout) for layout in ("tp2-sp-ep2", "pp2", "cp2")),
    *((family, "torch", "cp2") for family in RECURRENT),
    *(("qwen2", "transformer_engine", layout) for layout in ("dp2", "tp2-sp", "pp2", "pp2-vpp2")),
    *(("qwen3_moe", "transformer_engine", layout) for layout in ("ep2", "tp2-sp-ep2", "pp2", "etp2", "tp2-sp-etp2")),
    *(("deepseek_v3_mtp", "transformer_engine", layout) for layout in ("tp2-sp-ep2", "pp2", "tp2-sp-etp2")),
]
PARAMETERS = [
    pytest.param(*case, marks=needs_transformer_engine if case[1] == "transformer_engine" else ()) for case in CASES
]
PACKS_IN_BFLOAT16 = (".precision=bfloat16", *SETTINGS["sequence_packing"])
FUSED = ("transformer_impl=transformer_engine", "attention_backend=fused")
ALIKE_IN_BFLOAT16 = 2e-2
"""Relative: sums in another order, of numbers whose last bit is 2^-8."""
Train = Callable[..., "list[Outcome]"]


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Train]:
    """Three steps in a layout, each combination once; the outcomes of all ranks."""
    groups: dict[int, Ranks] = {}
    folders: dict[str, Path] = {}
    outcomes: dict[tuple[Any, ...], list[Outcome]] = {}

    def on(num_ranks: int) -> Ranks:
        if num_ranks in groups and not groups[num_ranks].is_whole:
            groups.pop(num_ranks).close()
        if num_ranks not in groups:
            groups[num_ranks] = Ranks(num_ranks, on_gpus=True)
        return groups[num_ranks]

    def train_in(family: str, layout: str, overrides: tuple[str, ...], modules: tuple[str, ...] = ()) -> list[Outcome]:
        key = (family, layout, overrides, modules)
        if family not in folders:
            shape = {} if family in RECURRENT else SHAPE | FEWER_KEYS.get(family, {})
            (folders[family],) = on(1).run("write", family, tmp_path_factory.mktemp(family), **shape)
        if key not in outcomes:
            num_ranks, settings = LAYOUTS[layout]
            more = (*SGD, *settings, *overrides, *offload(modules))
            outcomes[key] = on(num_ranks).run("train", folders[family], more, STEPS)
        return outcomes[key]

    yield train_in
    for group in groups.values():
        group.close()


@pytest.mark.parametrize(("family", "implementation", "layout"), PARAMETERS)
def test_a_layout_trains_as_one_rank_does(family: str, implementation: str, layout: str, train: Train) -> None:
    how = IMPLEMENTATIONS[implementation]
    (one,), outcomes = train(family, "one", how), train(family, layout, how)
    for expected, metrics in zip(one.metrics, outcomes[-1].metrics, strict=True):
        assert metrics == pytest.approx(expected, rel=TOLERANCE, abs=1e-7)
    assert relative_error(outcomes[0].gradients, one.gradients) < TOLERANCE
    assert relative_error(outcomes[0].weights, one.weights) < TOLERANCE


@pytest.mark.parametrize(("family", "implementation", "layout"), PARAMETERS)
def test_offloading_changes_no_bit(family: str, implementation: str, layout: str, train: Train) -> None:
    how = IMPLEMENTATIONS[implementation]
    modules = (MODULES if implementation == "torch" else TRANSFORMER_ENGINES_MODULES)[family]
    outcomes = train(family, layout, how, modules)
    assert_same_bits(outcomes, train(family, layout, how))
    for name in modules:
        assert sum(outcome.bytes_out.get(name, 0) for outcome in outcomes) > 0, name


@needs_transformer_engine
@pytest.mark.parametrize("layout", ["one", "cp2", "tp2-sp"])
def test_packs_under_fused_attention(layout: str, train: Train) -> None:
    """What NeMo-RL's recipes train by: packs in bfloat16, context parallel too."""
    (one,) = train("qwen2", "one", (".precision=bfloat16", *IMPLEMENTATIONS["torch"]))
    how = (*PACKS_IN_BFLOAT16, *FUSED)
    outcomes = train("qwen2", layout, how)
    for expected, metrics in zip(one.metrics, outcomes[-1].metrics, strict=True):
        assert metrics["loss"] == pytest.approx(expected["loss"], rel=ALIKE_IN_BFLOAT16)
        assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=ALIKE_IN_BFLOAT16)
    modules = TRANSFORMER_ENGINES_MODULES["qwen2"]
    offloaded = train("qwen2", layout, how, modules)
    assert_same_bits(offloaded, outcomes)
    for name in modules:
        assert sum(outcome.bytes_out.get(name, 0) for outcome in offloaded) > 0, name
