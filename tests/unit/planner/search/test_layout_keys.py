"""Layouts as overrides."""

import shlex

import pytest
from jobs import make_job

from nemo_rl_offload.config.loader import PROJECT_ROOT, load_config
from nemo_rl_offload.planner.job import read_job
from nemo_rl_offload.planner.search.layout_keys import job_keys, to_paste
from nemo_rl_offload.specs.parallel_layout import ParallelLayout

STAGES = "Et*7|(t*8|)*5t*7|t*7mL"


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("meta-llama/Llama-3.1-70B", ParallelLayout(32, 4, 2, 5, context=2, sequence_parallel=True)),
        ("deepseek-ai/DeepSeek-V3", ParallelLayout(64, 2, 8, expert=8, sequence_parallel=True, num_layers_first=5)),
        ("deepseek-ai/DeepSeek-V3", ParallelLayout(64, 1, 8, expert=8, num_layers_last=5)),
        ("Qwen/Qwen3-30B-A3B", ParallelLayout(16, 2, 4, expert=2, expert_tensor=2, sequence_parallel=True)),
        ("deepseek-ai/DeepSeek-V3", ParallelLayout(64, 2, 8, expert=8, sequence_parallel=True, stages=STAGES)),
    ],
)
@pytest.mark.parametrize("tokens", [None, 8192])
def test_what_is_pasted_is_the_job(name: str, layout: ParallelLayout, tokens: int | None) -> None:
    wanted = make_job(name, layout=layout, micro_batch=2, micro_batch_tokens=tokens, is_packed=tokens is not None)
    overrides = shlex.split(to_paste(job_keys(wanted)))
    packing = f"policy.sequence_packing.enabled={str(bool(tokens)).lower()}"
    given = ("policy.model_name=any", "policy.max_total_sequence_length=4096", packing)
    policy = load_config(PROJECT_ROOT / "examples/configs/base.yaml", [*given, *overrides])["policy"]
    read = read_job(policy, wanted.shape, wanted.device, layout.world)
    assert read.layout == layout
    assert (read.micro_batch, read.micro_batch_tokens) == (2, tokens)
    assert policy["megatron_cfg"]["batch_p2p_comm"] is (layout.pipeline != 2), "with virtual stages"
