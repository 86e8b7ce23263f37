"""Layouts that are looked at, and their estimates."""

from dataclasses import replace

import pytest
from jobs import make_job

from nemo_rl_offload.planner.cost.messages import messages_ms
from nemo_rl_offload.planner.job import Job
from nemo_rl_offload.planner.search.layouts import LayoutTask, bases, estimated_ms, least_state_bytes
from nemo_rl_offload.planner.search.to_config import run_nothing
from nemo_rl_offload.planner.simulate.simulated_step import highest_peak
from nemo_rl_offload.specs.parallel_layout import ParallelLayout, check_layout, stage_layers


def task(name: str, world: int, batch: int = 64, samples: int = 4, **changes: object) -> LayoutTask:
    job = make_job(name, layout=ParallelLayout(world), makes_logits=False, **changes)
    return LayoutTask(job, job.sequence, batch, samples, None, lambda _: None)


@pytest.mark.parametrize(
    ("name", "world"),
    [("deepseek-ai/DeepSeek-V3", 256), ("meta-llama/Llama-3.1-70B", 24), ("Qwen/Qwen3-30B-A3B", 8)],
)
def test_every_variant_divides_what_there_is(name: str, world: int) -> None:
    found = bases(task(name, world))
    jobs = [job for base in found for _, job in base.variants]
    assert len({base.variants[0][1].layout for base in found}) == len(found) > 10
    for job in jobs:
        layout = job.layout
        check_layout(layout, job.shape, job.sequence)
        assert layout.world == world
        assert 8 % layout.tensor == 0
        assert layout.sequence_parallel is (layout.tensor > 1)
        assert job.num_microbatches * job.micro_batch * layout.data == 64
        assert layout.virtual == 1 or job.num_microbatches % layout.pipeline == 0
        stages = [sum(map(len, stage)) for stage in stage_layers(layout, job.shape.num_layers)]
        assert sum(stages) == job.shape.num_layers
        assert min(stages) > 0
    assert [base.least_ms for base in found] == sorted(base.least_ms for base in found)
    assert {job.micro_batch for job in jobs} == {1, 2, 4}


def test_layers_that_do_not_divide_get_uneven_stages() -> None:
    layouts = {job.layout for base in bases(task("deepseek-ai/DeepSeek-V3", 256)) for _, job in base.variants}
    of_eight = [layout for layout in layouts if layout.pipeline == 8]
    assert {layout.num_layers_first for layout in of_eight} == {None, 5}
    assert any(layout.stages for layout in of_eight if layout.virtual == 1)
    assert {layout.virtual for layout in of_eight} == {1, 2, 4}


def test_context_parallelism_is_not_for_short_rows() -> None:
    short = bases(task("meta-llama/Llama-3.1-8B", 8, sequence=2048))
    assert {job.layout.context for base in short for _, job in base.variants} == {1, 2}


def test_a_teacher_is_divided_by_the_same_ranks() -> None:
    teacher = make_job("Qwen/Qwen2.5-7B").shape
    found = bases(task("meta-llama/Llama-3.1-8B", 8, teacher=teacher))
    assert {job.layout.pipeline for base in found for _, job in base.variants} == {1, 2, 4}, "28 layers, not 8"
    assert {job.layout.tensor for base in found for _, job in base.variants} == {1, 2, 4}, "28 heads"


def test_each_expert_is_divided_where_there_are_fewer_experts_than_ranks_for_them() -> None:
    name = "Qwen/Qwen3-30B-A3B"
    many = bases(task(name, 16))
    assert {job.layout.expert_tensor for base in many for _, job in base.variants} == {1}
    shape = make_job(name).shape
    assert shape.experts is not None
    few = replace(shape, experts=replace(shape.experts, num_experts=4, ffn_hidden_size=32 * 768))
    layouts = {base.smallest.layout: least_state_bytes(base.smallest) for base in bases(task(name, 16, shape=few))}
    shared = {layout: size for layout, size in layouts.items() if layout.expert_tensor > 1}
    assert shared
    for layout in shared:
        assert layout.expert_tensor == layout.tensor
        assert 4 % (layout.expert * layout.tensor) > 0
        assert 16 % (layout.expert * layout.expert_tensor * layout.pipeline) == 0
    assert min(shared.values()) < min(size for layout, size in layouts.items() if layout.expert_tensor == 1)


def test_experts_with_adapters_or_biases_are_whole() -> None:
    shape = make_job("openai/gpt-oss-120b").shape
    assert shape.experts is not None
    few = replace(shape, experts=replace(shape.experts, num_experts=4))
    assert {base.smallest.layout.expert_tensor for base in bases(task("openai/gpt-oss-120b", 16, shape=few))} == {1}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "world"), [("Qwen/Qwen3-8B", 32), ("Qwen/Qwen3-30B-A3B", 32), ("deepseek-ai/DeepSeek-V3", 256)]
)
def test_estimates_are_what_is_simulated(name: str, world: int) -> None:
    """The fastest variants of each number of stages; a pipeline whose stages differ may take a little less or more."""
    seen: dict[tuple[int, bool], Job] = {}
    for base in bases(task(name, world, batch=8 * world)):
        for _, job in base.variants:
            seen.setdefault((job.layout.pipeline, job.layout.virtual > 1), job)
    assert len(seen) > 3
    for job in seen.values():
        step = run_nothing(job)
        assert estimated_ms(job) - messages_ms(job) == pytest.approx(step.step_ms, rel=0.05), job.layout
        assert least_state_bytes(job) < highest_peak(step)
