"""What a recurrent layer saves and takes between its two projections is what the planner says, on a CPU."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import make_policy, write_model
from torch.profiler import ProfilerActivity, profile

from nemo_rl_offload.megatron.build.model import build_model
from nemo_rl_offload.megatron.layers.recurrent_mixer import RecurrentMixer
from nemo_rl_offload.planner.cost.recurrent import core_bytes, gradients_of_core, mixer_of
from nemo_rl_offload.planner.cost.storages import LayerContext, Numbers, Tokens
from nemo_rl_offload.specs.catalogue import load_model_shape
from nemo_rl_offload.specs.parallel_layout import ParallelLayout

LENGTH = 1024
WIDE = {"hidden_size": 256, "head_dim": 64, "max_position_embeddings": LENGTH, "num_hidden_layers": 1}
MAMBA = {**WIDE, "hybrid_override_pattern": "M", "n_groups": 1, "mamba_head_dim": 64, "ssm_state_size": 128}
DELTA = {**WIDE, "layer_types": ["linear_attention"], "linear_key_head_dim": 128}


def peak_bytes(act: Callable[[], object]) -> int:
    """The most that is taken beside what is there."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        act()
    inner: Any = profiled.profiler
    events = [event for event in inner.kineto_results.events() if event.name() == "[memory]"]
    present = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        present += event.nbytes()
        most = max(most, present)
    return most


@pytest.mark.slow
@pytest.mark.usefixtures("megatron_process_group")
@pytest.mark.parametrize(
    ("family", "shape"),
    [
        ("nemotron_h", {**MAMBA, "chunk_size": 128}),
        ("nemotron_h", {**MAMBA, "chunk_size": 256}),
        ("nemotron_h", {**MAMBA, "chunk_size": 512}),
        ("qwen3_5_text", {**DELTA, "linear_value_head_dim": 128}),
        ("qwen3_5_text", {**DELTA, "linear_value_head_dim": 32}),
    ],
)
def test_peaks_of_a_recurrence_are_within_the_planned(family: str, shape: dict[str, Any], tmp_path: Path) -> None:
    folder = write_model(family, tmp_path, **shape)
    model = build_model(make_policy(".precision=bfloat16"), folder, num_steps=1)
    mixer = next(each for chunk in model.modules for each in chunk.modules() if isinstance(each, RecurrentMixer))
    read = load_model_shape(str(folder), folder)
    context, kind = LayerContext(read, ParallelLayout(), Tokens(LENGTH, LENGTH), Numbers()), read.layer_kinds[0]
    projected = torch.randn(LENGTH, 1, mixer_of(context, kind).projected).bfloat16().requires_grad_()
    with torch.no_grad():
        alone = peak_bytes(lambda: mixer._mix(projected))
    assert 0.7 < alone / core_bytes(context, kind) < 1
    found: list[torch.Tensor] = []
    most = peak_bytes(lambda: found.append(mixer._mix(projected)))
    assert 1 < most / core_bytes(context, kind) < 1.25
    (mixed,) = found
    gradient = torch.ones_like(mixed)
    backward = peak_bytes(lambda: mixed.backward(gradient))  # type: ignore[no-untyped-call]
    assert 0.6 < backward / gradients_of_core(context, kind) <= 1.01
