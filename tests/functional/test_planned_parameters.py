"""The planner counts the parameters that the built model has, on every rank."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from models import make_policy, write_model
from ranks import Ranks

from nemo_rl_offload.megatron.build.model import build_model
from nemo_rl_offload.planner.cost.memory import stage_parameters
from nemo_rl_offload.planner.cost.parameters import ParameterCount
from nemo_rl_offload.specs.catalogue import load_model_shape
from nemo_rl_offload.specs.parallel_layout import ParallelLayout, stage_layers

RECURRENT = ("nemotron_h", "nemotron_h_latent", "nemotron_h_mtp", "qwen3_5_text", "qwen3_5_moe_text")
OTHERS = ("qwen2", "qwen3", "llama", "llama_biased", "qwen3_moe", "deepseek_v3_mtp", "gpt_oss", "gemma3_text")
SP = ("tensor_model_parallel_size=2", "sequence_parallel=true")
LAYOUTS: dict[str, tuple[ParallelLayout, tuple[str, ...]]] = {
    "tp2": (ParallelLayout(2, tensor=2, sequence_parallel=True), SP),
    "tp2-etp2": (
        ParallelLayout(2, tensor=2, expert_tensor=2, sequence_parallel=True),
        (*SP, "expert_tensor_parallel_size=2"),
    ),
    "pp2": (ParallelLayout(2, pipeline=2), ("pipeline_model_parallel_size=2",)),
    "ep2": (ParallelLayout(2, expert=2), ("expert_model_parallel_size=2",)),
    "cp2": (ParallelLayout(2, context=2), ("context_parallel_size=2",)),
}


def planned(folder: Path, layout: ParallelLayout) -> list[ParameterCount]:
    shape = load_model_shape(str(folder), folder)
    stages = stage_layers(layout, shape.num_layers)
    return [stage_parameters(shape, layout, chunks, rank) for rank, chunks in enumerate(stages)]


@pytest.mark.usefixtures("megatron_process_group")
@pytest.mark.parametrize("family", [*RECURRENT, *(pytest.param(each, marks=pytest.mark.slow) for each in OTHERS)])
def test_parameters_are_those_of_the_built_model(family: str, tmp_path: Path) -> None:
    folder = write_model(family, tmp_path)
    model = build_model(make_policy(), folder, num_steps=1)
    named = [pair for module in model.modules for pair in module.named_parameters()]
    of_experts = sum(weight.numel() for name, weight in named if ".experts." in name)
    shared = sum(weight.numel() for _, weight in named) - of_experts
    assert planned(folder, ParallelLayout()) == [ParameterCount(shared, of_experts)]


@pytest.mark.slow
@pytest.mark.parametrize("family", RECURRENT)
@pytest.mark.parametrize("name", LAYOUTS)
def test_so_are_those_of_every_rank(name: str, family: str, ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    if name in ("tp2-etp2", "ep2") and family == "qwen3_5_text":
        pytest.skip("without experts")
    layout, overrides = LAYOUTS[name]
    shape: dict[str, Any] = {"num_hidden_layers": 4} if family.startswith("qwen") else {}
    folder = write_model(family, tmp_path, **shape)
    counted: list[tuple[int, int]] = ranks(2).run("count_trained", folder, overrides)
    by_stage = planned(folder, layout)
    ranks_of_stage = layout.world // layout.pipeline
    expected = [by_stage[rank // ranks_of_stage] for rank in range(layout.world)]
    assert counted == [(each.expert, each.shared) for each in expected]
