"""What the optimizer keeps on the host is refused before a run where the budget is known not to hold it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from nemo_rl_offload.cli.check import check_file, with_data
from nemo_rl_offload.config.loader import PROJECT_ROOT, load_config
from nemo_rl_offload.planner.host_budget import host_problems

FILE = PROJECT_ROOT / "examples/configs/grpo_tiny.yaml"
M = "policy.megatron_cfg"
ON_HOST = f"{M}.optimizer.optimizer_cpu_offload=true"


def problems(budget: str, *overrides: str) -> list[str]:
    config: Any = load_config(FILE, [ON_HOST, f"{M}.activation_offload.host_memory_budget={budget}", *overrides])
    return list(host_problems(config))


@pytest.fixture(scope="module")
def num_parameters() -> int:
    """By transformers."""
    config = AutoConfig.from_pretrained(PROJECT_ROOT / "examples/models/tiny_speller")
    with torch.device("meta"):
        return sum(weight.numel() for weight in AutoModelForCausalLM.from_config(config).parameters())


@pytest.mark.parametrize(
    ("overrides", "each", "ranks"),
    [
        (("policy.precision=float32",), 8, 1),
        (("policy.precision=bfloat16",), 12, 1),
        (("policy.precision=bfloat16", f"{M}.optimizer.optimizer_offload_fraction=0.25"), 3, 1),
        (
            ("policy.precision=bfloat16", "cluster.gpus_per_node=2", f"{M}.optimizer.use_distributed_optimizer=true"),
            12,
            2,
        ),
        (
            ("policy.precision=bfloat16", "cluster.gpus_per_node=2", f"{M}.optimizer.use_distributed_optimizer=false"),
            12,
            1,
        ),
        (
            (
                "policy.precision=float32",
                "cluster.gpus_per_node=auto",
                f"{M}.optimizer.use_distributed_optimizer=false",
                f"{M}.optimizer.optimizer=sgd",
                f"{M}.optimizer.sgd_momentum=0.5",
            ),
            4,
            1,
        ),
    ],
)
def test_the_least_budget_is_what_the_state_takes(
    overrides: tuple[str, ...], each: float, ranks: int, num_parameters: int
) -> None:
    least_bytes = each * num_parameters / ranks
    assert problems(f"{least_bytes * 1.01 / 1024:.1f}KiB", *overrides) == []
    (problem,) = problems(f"{least_bytes * 0.99 / 1024:.1f}KiB", *overrides)
    assert problem.startswith(f"{M}.activation_offload.host_memory_budget: ")
    assert "optimizer_offload_fraction" in problem


@pytest.mark.parametrize(
    ("overrides", "each"),
    [
        ((f"{M}.optimizer.optimizer_cpu_offload=false",), 12),
        ((f"{M}.optimizer.optimizer_offload_fraction=0.25",), 12),
        ((f"{M}.optimizer.optimizer_offload_fraction=1",), 12),
        (("loss_fn.reference_policy_kl_penalty=0.1", f"{M}.optimizer.optimizer_cpu_offload=false"), 14),
        (("algorithm=sft",), 12),
    ],
    ids=["away alone", "a part stays there", "all stays there", "and a reference", "sft"],
)
def test_what_leaves_for_log_probabilities_counts(overrides: tuple[str, ...], each: float, num_parameters: int) -> None:
    overrides = ("policy.precision=bfloat16", "policy.offload_optimizer_for_logprob=true", *overrides)
    least_bytes = each * num_parameters
    assert problems(f"{least_bytes * 1.01 / 1024:.1f}KiB", *overrides) == []
    (problem,) = problems(f"{least_bytes * 0.99 / 1024:.1f}KiB", *overrides)
    nothing_leaves = {"algorithm=sft", f"{M}.optimizer.optimizer_offload_fraction=1"} & {*overrides}
    assert ("or leave out policy.offload_optimizer_for_logprob" in problem) == (not nothing_leaves)


def test_nothing_is_said_of_what_only_the_machine_knows() -> None:
    assert problems("0.001") == []
    assert problems("1KiB", "cluster.gpus_per_node=auto", f"{M}.optimizer.use_distributed_optimizer=true") == []
    assert problems("1KiB", "policy.model_name=not/here") == []
    config: Any = load_config(FILE, [f"{M}.activation_offload.host_memory_budget=1KiB"])
    assert list(host_problems(config)) == []


def test_check_says_it_and_where_the_budget_stands(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        f"defaults: {FILE}\npolicy: {{megatron_cfg: {{optimizer: {{optimizer_cpu_offload: true}}, "
        "activation_offload: {host_memory_budget: 1KiB}}}\n"
    )
    found = with_data(check_file(file, ()))
    (problem,) = found.problems
    assert found.config is None
    assert "1KiB a rank" in problem.message
