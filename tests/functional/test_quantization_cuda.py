"""Quantization-aware training on a GPU: weights as on a CPU, by both kinds of layers, and the bits of a plain model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import Ranks
from safetensors.torch import load_file
from test_parallel_layouts_cuda import needs_transformer_engine
from test_quantization import BFLOAT16, ON, SGD, SHAPES, joined, quantized

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LAYERS = [
    "transformer_impl=torch",
    pytest.param("transformer_impl=transformer_engine", marks=needs_transformer_engine),
]
FAMILIES = ["qwen2", "qwen3_moe"]
ADAM = (
    *("optimizer.optimizer=adam", "optimizer.use_distributed_optimizer=true", "optimizer.lr=1e-3"),
    *("optimizer.use_precision_aware_optimizer=true", "optimizer.optimizer_cpu_offload=true"),
    *("distributed_data_parallel_config.overlap_grad_reduce=true",),
    *("distributed_data_parallel_config.overlap_param_gather=true",),
)


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[..., Any]]:
    """Call a function of `rank_work` on one rank with the GPU."""
    rank = Ranks(1, on_gpus=True)

    def on_the_gpu(function: str, *args: Any, **how: Any) -> Any:
        nonlocal rank
        if not rank.is_whole:
            rank.close()
            rank = Ranks(1, on_gpus=True)
        return rank.run(function, *args, **how)[0]

    yield on_the_gpu
    rank.close()


@pytest.fixture(scope="module")
def folder(run: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folders: dict[str, Path] = {}

    def folder_of(family: str) -> Path:
        if family not in folders:
            folders[family] = run("write", family, tmp_path_factory.mktemp(family), **SHAPES[family])
        return folders[family]

    return folder_of


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_it_starts_with_the_weights_of_a_cpu(
    family: str, layers: str, run: Callable[..., Any], folder: Callable[[str], Path]
) -> None:
    path = folder(family)
    found, _ = run("start_weights", path, (*ON, layers))
    of_folder = load_file(path / "model.safetensors")
    expected = quantized({name: each.to(torch.bfloat16) for name, each in of_folder.items()})
    for name, weight in expected.items():
        np.testing.assert_array_equal(found[name], weight.float().numpy(), err_msg=name)


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_has_the_gradients_of_a_model_with_these_weights(
    family: str, layers: str, run: Callable[..., Any], folder: Callable[[str], Path], tmp_path: Path
) -> None:
    quantized_folder = run("write_start", folder(family), (*ON, layers), tmp_path / "quantized")
    steps = ((0, 8), (1, 8))
    aware = run("train", folder(family), (*ON, *SGD, layers), steps)
    plain = run("train", quantized_folder, (*BFLOAT16, *SGD, layers), steps)
    assert aware.metrics[0] == plain.metrics[0]
    assert aware.digests[0] == plain.digests[0]
    assert aware.digests[1] != plain.digests[1], "after a step they are quantized again"


@pytest.mark.parametrize("layers", LAYERS)
def test_weights_are_quantized_after_steps_of_an_optimizer_on_the_host(
    layers: str, run: Callable[..., Any], folder: Callable[[str], Path]
) -> None:
    precision_aware = () if "engine" in layers else ("optimizer.use_precision_aware_optimizer=false",)
    outcome = run("train", folder("qwen2"), (*ON, *ADAM, *precision_aware, layers), ((0, 8), (1, 8), (2, 8)))
    weights = {name: torch.from_numpy(each).to(torch.bfloat16) for name, each in outcome.weights.items()}
    for name, again in quantized(weights).items():
        assert torch.equal(again, weights[name]), name
        assert joined(name) is None or weights[name].unique().numel() < weights[name].numel() / 2, name
