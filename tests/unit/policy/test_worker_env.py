from typing import Any

import pytest

from nemo_rl_offload.config.loader import PROJECT_ROOT, load_config
from nemo_rl_offload.config.worker_rules import SET_BY_GROUP
from nemo_rl_offload.policy.ranks import worker_env


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], {}),
        (["env_vars={NCCL_DEBUG:INFO}"], {"NCCL_DEBUG": "INFO"}),
        (["activation_offload.engine=megatron"], {"NVTE_CPU_OFFLOAD_V1": "1"}),
        (["activation_offload.engine=megatron", "env_vars={A:b}"], {"NVTE_CPU_OFFLOAD_V1": "1", "A": "b"}),
    ],
)
def test_worker_env(overrides: list[str], expected: dict[str, str]) -> None:
    paths = [f"policy.megatron_cfg.{text}" for text in overrides]
    policy: Any = load_config(PROJECT_ROOT / "examples/configs/grpo_tiny.yaml", paths)["policy"]
    assert worker_env(policy) == expected


def test_variables_of_the_worker_group_are_reserved() -> None:
    assert not {"OMP_NUM_THREADS", "NVTE_CPU_OFFLOAD_V1"} & set(SET_BY_GROUP)
