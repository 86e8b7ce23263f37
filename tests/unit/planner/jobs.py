"""Jobs for the planner's tests."""

from dataclasses import replace
from typing import Any

from nemo_rl_offload.planner.job import Job
from nemo_rl_offload.specs.catalogue import load_model_shape
from nemo_rl_offload.specs.devices import find_device
from nemo_rl_offload.specs.parallel_layout import ParallelLayout

SENSIBLE = {
    "Qwen/Qwen2.5-1.5B": ParallelLayout(8),
    "Qwen/Qwen2.5-7B": ParallelLayout(8, tensor=2, sequence_parallel=True),
    "Qwen/Qwen2.5-32B": ParallelLayout(32, tensor=4, pipeline=2, sequence_parallel=True),
    "Qwen/Qwen3-8B": ParallelLayout(8, tensor=2, sequence_parallel=True),
    "Qwen/Qwen3-30B-A3B": ParallelLayout(16, expert=8),
    "Qwen/Qwen3-235B-A22B": ParallelLayout(128, tensor=4, pipeline=2, virtual=1, expert=16, sequence_parallel=True),
    "meta-llama/Llama-3.1-8B": ParallelLayout(8, context=2),
    "meta-llama/Llama-3.1-70B": ParallelLayout(64, tensor=4, pipeline=4, virtual=2, sequence_parallel=True),
    "deepseek-ai/DeepSeek-V3": ParallelLayout(256, pipeline=16, expert=16, num_layers_first=4, num_layers_last=1),
    "openai/gpt-oss-120b": ParallelLayout(64, pipeline=4, expert=8),
}
"""One layout for each model of the catalogue."""


def make_job(
    name: str = "Qwen/Qwen2.5-7B", device: str = "h100-80gb", num_layers: int | None = None, **changes: Any
) -> Job:
    """A job of a catalogue model on its sensible layout, else 8 data-parallel ranks; sequences of 4096 tokens. Changed
    by fields of Job.

    With `num_layers`, of that many layers like the model's last.
    """
    layout = SENSIBLE.get(name, ParallelLayout(8))
    shape = load_model_shape(name, None)
    if num_layers is not None:
        shape = replace(shape, num_layers=num_layers, layers_with_experts=shape.layers_with_experts[-num_layers:])
    job = Job(shape, layout, find_device(device), 4096, 1, 4 * layout.pipeline)
    return replace(job, **changes)
