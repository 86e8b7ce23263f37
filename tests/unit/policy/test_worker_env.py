from typing import Any

import pytest

from nemo_rl_offload.config.loader import PROJECT_ROOT, load_config
from nemo_rl_offload.config.rules.machine import SET_BY_GROUP
from nemo_rl_offload.policy.model_workers import without_offloading, worker_env
from nemo_rl_offload.specs.allocator import EXPANDABLE, VARIABLES

FIXED = "expandable_segments:False"
THEIRS, OLDER = VARIABLES[1], VARIABLES[0]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}),
        (["fine_grained_activation_offloading=false", "offload_modules=null"], {}),
        (["tensor_model_parallel_size=2"], {}),
        (["env_vars={CUDA_DEVICE_MAX_CONNECTIONS:'1',A:b}"], {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "A": "b"}),
        (["activation_offload.engine=megatron"], {"NVTE_CPU_OFFLOAD_V1": "1"}),
        (["activation_offload.engine=megatron", "env_vars={A:b}"], {"NVTE_CPU_OFFLOAD_V1": "1", "A": "b"}),
    ],
)
def test_worker_env(overrides: list[str], expected: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    monkeypatch.setenv(OLDER, "max_split_size_mb:512")
    paths = [f"policy.megatron_cfg.{text}" for text in overrides]
    policy: Any = load_config(PROJECT_ROOT / "examples/configs/grpo_tiny.yaml", paths)["policy"]
    assert worker_env(policy) == expected


@pytest.mark.parametrize(
    ("there", "own", "expected"),
    [
        ({}, {}, {OLDER: EXPANDABLE}),
        ({OLDER: "", THEIRS: ""}, {"A": "b"}, {OLDER: EXPANDABLE}),
        ({OLDER: "", THEIRS: FIXED}, {}, {OLDER: EXPANDABLE}),  # torch reads the first alone
        ({THEIRS: ""}, {}, {THEIRS: EXPANDABLE}),
        ({THEIRS: "max_split_size_mb:512"}, {}, {}),
        ({OLDER: FIXED}, {}, {}),
        ({OLDER: FIXED, THEIRS: ""}, {}, {}),
        ({}, {THEIRS: FIXED}, {THEIRS: FIXED}),
        ({OLDER: FIXED}, {OLDER: EXPANDABLE}, {OLDER: EXPANDABLE}),
    ],
)
def test_segments_expand_where_the_user_says_nothing_of_the_allocator(
    there: dict[str, str], own: dict[str, str], expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in there.items():
        monkeypatch.setenv(name, value)
    policy: Any = load_config(PROJECT_ROOT / "examples/configs/grpo_tiny.yaml", [])["policy"]
    policy["megatron_cfg"]["env_vars"] = own or None
    found = worker_env(policy)
    assert {name: value for name, value in found.items() if name in VARIABLES} == expected


def test_segments_do_not_expand_where_layers_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    overrides = ["policy.megatron_cfg.cuda_graph_impl=transformer_engine"]
    policy: Any = load_config(PROJECT_ROOT / "examples/configs/grpo_tiny.yaml", overrides)["policy"]
    assert not set(VARIABLES) & set(worker_env(policy))


def test_the_users_number_of_hardware_queues_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "16")
    policy: Any = load_config(PROJECT_ROOT / "examples/configs/grpo_tiny.yaml", [])["policy"]
    assert worker_env(policy)["CUDA_DEVICE_MAX_CONNECTIONS"] == "16"


def test_variables_of_the_worker_group_are_reserved() -> None:
    assert not {"OMP_NUM_THREADS", "NVTE_CPU_OFFLOAD_V1"} & set(SET_BY_GROUP)


def test_a_model_that_never_trains_captures_no_layers() -> None:
    """A teacher may have experts where the student has none, and Megatron checks parts against layers."""
    graphs = ["cuda_graph_impl=transformer_engine", "cuda_graph_modules=[mlp]", "delay_offload_until_cuda_graph=true"]
    overrides = [f"policy.megatron_cfg.{text}" for text in graphs]
    policy: Any = load_config(PROJECT_ROOT / "examples/configs/grpo_tiny.yaml", overrides)["policy"]
    off = without_offloading(policy)["megatron_cfg"]
    assert [off[key] for key in ("cuda_graph_impl", "cuda_graph_modules", "delay_offload_until_cuda_graph")] == [  # type: ignore[literal-required]
        *("none", None, False)
    ]
    assert policy["megatron_cfg"]["cuda_graph_impl"] == "transformer_engine"
