"""Memory of the output head by its formula."""

import dataclasses

from jobs import make_job

from nemo_rl_offload.planner.cost.head import logits_bytes
from nemo_rl_offload.planner.plan import make_plan
from nemo_rl_offload.specs.catalogue import load_model_shape
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


def test_a_plan_counts_the_configured_chunk() -> None:
    job = make_job("Qwen/Qwen2.5-7B", sequence=8192)
    whole, chunked = (make_plan(each) for each in (job, dataclasses.replace(job, logprob_chunk_size=1024)))
    saved = whole.baseline.stages[-1].static_bytes["logits"] - chunked.baseline.stages[-1].static_bytes["logits"]
    assert saved == 8192 * (152064 // job.layout.tensor) * (2 + 12 - 3 * 2)
