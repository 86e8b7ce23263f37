"""Parallel layouts over NCCL train as one rank does, and offloading changes no bit in any of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from models import offload
from ranks import Ranks, relative_error
from test_parallel_layouts import LAYOUTS, MODULES, SGD, STEPS, TOLERANCE, assert_same_bits

if TYPE_CHECKING:
    from rank_work import Outcome

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

FAMILY = "qwen2"
SHAPE = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
Train = Callable[..., "list[Outcome]"]


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Train]:
    """Three steps in a layout, each combination once; the outcomes of all ranks."""
    groups = {number: Ranks(number, on_gpus=True) for number in (1, 2)}
    (folder,) = groups[1].run("write", FAMILY, tmp_path_factory.mktemp(FAMILY), **SHAPE)
    outcomes: dict[tuple[Any, ...], list[Outcome]] = {}

    def train_in(layout: str, modules: tuple[str, ...] = ()) -> list[Outcome]:
        if (layout, modules) not in outcomes:
            num_ranks, settings = LAYOUTS[layout]
            outcomes[layout, modules] = groups[num_ranks].run(
                "train", Path(folder), (*SGD, *settings, *offload(modules)), STEPS
            )
        return outcomes[layout, modules]

    yield train_in
    for group in groups.values():
        group.close()


@pytest.mark.parametrize("layout", ["dp2", "tp2-sp", "pp2", "pp2-vpp2", "cp2"])
def test_a_layout_trains_as_one_rank_does(layout: str, train: Train) -> None:
    (one,), outcomes = train("one"), train(layout)
    for expected, metrics in zip(one.metrics, outcomes[-1].metrics, strict=True):
        assert metrics == pytest.approx(expected, rel=TOLERANCE, abs=1e-7)
    assert relative_error(outcomes[0].gradients, one.gradients) < TOLERANCE
    assert relative_error(outcomes[0].weights, one.weights) < TOLERANCE


@pytest.mark.parametrize("layout", ["dp2", "tp2-sp", "pp2", "pp2-vpp2"])
def test_offloading_changes_no_bit(layout: str, train: Train) -> None:
    outcomes = train(layout, MODULES[FAMILY])
    assert_same_bits(outcomes, train(layout))
    for name in MODULES[FAMILY]:
        assert sum(outcome.bytes_out.get(name, 0) for outcome in outcomes) > 0, name
