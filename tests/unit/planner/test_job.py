"""A job read from a configuration whose microbatches are numbers of tokens."""

from typing import Any

import pytest

from nemo_rl_offload.config.loader import PROJECT_ROOT, load_config
from nemo_rl_offload.planner.catalogue import load_model_shape
from nemo_rl_offload.planner.hardware import find_device
from nemo_rl_offload.planner.job import Job, read_job


def job(*overrides: str) -> Job:
    config: Any = load_config(PROJECT_ROOT / "examples/configs/grpo_math_1B.yaml", list(overrides))
    return read_job(config["policy"], load_model_shape("Qwen/Qwen2.5-1.5B", None), find_device("h100-80gb"), 4)


@pytest.mark.parametrize("section", ["dynamic_batching", "sequence_packing"])
def test_a_number_of_tokens_is_as_many_of_the_longest_samples(section: str) -> None:
    on = f"policy.{section}.enabled=true"
    assert job(on) == job()
    larger = job(on, f"policy.{section}.train_mb_tokens={6 * 1024}", "policy.train_global_batch_size=500")
    assert (larger.micro_batch, larger.num_microbatches) == (6, 21)  # 500 samples on 4 ranks, the last not full


def test_the_engine_that_moves_modules_is_read() -> None:
    config: Any = load_config(PROJECT_ROOT / "examples/configs/grpo_math_1B.yaml", [])
    policy = config["policy"]
    shape, device = load_model_shape("Qwen/Qwen2.5-1.5B", None), find_device("h100-80gb")
    assert read_job(policy, shape, device, 4).native_engine
    policy["megatron_cfg"]["activation_offload"]["engine"] = "megatron"
    assert not read_job(policy, shape, device, 4).native_engine
