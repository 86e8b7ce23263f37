"""Memory of the output head by its formula."""

import dataclasses

from jobs import make_job

from nemo_rl_offload.planner.cost.head import forward_logits_bytes, fused_head_bytes, logits_bytes
from nemo_rl_offload.planner.plan import make_plan
from nemo_rl_offload.specs.catalogue import load_model_shape
from nemo_rl_offload.specs.lora import Adapters
from nemo_rl_offload.specs.parallel_layout import ParallelLayout


def test_logits() -> None:
    shape = load_model_shape("Qwen/Qwen2.5-7B", None)
    assert logits_bytes(shape, ParallelLayout(2, tensor=2), 100, 2) == 100 * 152064 // 2 * 14


def test_logits_in_chunks() -> None:
    shape, vocabulary = load_model_shape("Qwen/Qwen2.5-7B", None), 152064
    layout = ParallelLayout(1)
    assert logits_bytes(shape, layout, 100, 2, 100) == logits_bytes(shape, layout, 100, 2)
    assert logits_bytes(shape, layout, 100, 2, 50) == vocabulary * (4 * 100 + 12 * 50)
    assert logits_bytes(shape, layout, 100, 2, 10) == vocabulary * (4 * 100 + 2 * 100)


def test_an_adapter_of_the_output_layer() -> None:
    shape, vocabulary, layout = load_model_shape("Qwen/Qwen2.5-7B", None), 152064, ParallelLayout(1)
    without, adapted = (fused_head_bytes(shape, layout, 100, 2, is_frozen=True, adapter_dim=dim) for dim in (0, 16))
    assert adapted - without == 16 * (100 * (2 * 2 + 4) + 2 * vocabulary)
    assert forward_logits_bytes(shape, layout, 100, 2, adapter_dim=16) == forward_logits_bytes(shape, layout, 100, 2)
    assert forward_logits_bytes(shape, layout, 100, 2, 1, adapter_dim=16) == vocabulary * 3 * 2 * 100
    job = make_job("Qwen/Qwen2.5-7B", sequence=8192)
    plans = [
        make_plan(dataclasses.replace(job, makes_logits=False, adapters=Adapters(targets, (), 16)))
        for targets in (("linear_proj",), ("linear_proj", "output_layer"))
    ]
    less, more = (plan.baseline.stages[-1].static_bytes for plan in plans)
    rows = vocabulary // job.layout.tensor
    assert more["output head"] - less["output head"] == 16 * (job.context.tokens.count * 8 + 2 * rows)
    assert more["weights"] - less["weights"] == 2 * 16 * (vocabulary + 3584) // job.layout.tensor


def test_a_plan_counts_the_configured_chunk() -> None:
    job = make_job("Qwen/Qwen2.5-7B", sequence=8192)
    whole, chunked = (make_plan(each) for each in (job, dataclasses.replace(job, logprob_chunk_size=1024)))
    saved = whole.baseline.stages[-1].static_bytes["logits"] - chunked.baseline.stages[-1].static_bytes["logits"]
    assert saved == 8192 * (152064 // job.layout.tensor) * (2 + 12 - 3 * 2)
