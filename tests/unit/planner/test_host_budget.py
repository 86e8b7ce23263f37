"""What the optimizer keeps on the host is refused before a run where the budget is known not to hold it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from nemo_rl_offload.cli import command_line
from nemo_rl_offload.cli.check import check_file, with_data
from nemo_rl_offload.config.loader import PROJECT_ROOT, load_config
from nemo_rl_offload.config.rules import machine
from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.planner.host_budget import Here, host_problems

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


def test_a_teachers_weights_have_to_fit_too() -> None:
    """Its workers ended in that error after both models were loaded."""
    path = PROJECT_ROOT / "examples/configs/distillation_tiny.yaml"
    teacher = AutoConfig.from_pretrained(PROJECT_ROOT / "examples/models/tiny_teacher")
    with torch.device("meta"):
        count = sum(weight.numel() for weight in AutoModelForCausalLM.from_config(teacher).parameters())
    key = f"{M}.activation_offload.host_memory_budget"
    for precision, size in (("null", 4), ("bfloat16", 2)):
        for share, is_refused in ((0.99, True), (1.01, False)):
            changes = [f"{key}={share * size * count / 1024:.1f}KiB", f"teacher.precision={precision}"]
            config: Any = load_config(path, changes)
            found = list(host_problems(config))
            assert bool(found) == is_refused
            assert all("has no room for the teacher's weights (" in line for line in found)
    config = load_config(path)
    assert list(host_problems(config, Here(1, 1 << 20, has_gpus=False))) == []
    assert list(host_problems(config, Here(1, 1 << 20, has_gpus=True))) != []


def test_nothing_is_said_of_what_only_the_machine_knows() -> None:
    assert problems("0.001") == []
    assert problems("1KiB", "cluster.gpus_per_node=auto", f"{M}.optimizer.use_distributed_optimizer=true") == []
    assert problems("1KiB", "policy.model_name=not/here") == []
    config: Any = load_config(FILE, [f"{M}.activation_offload.host_memory_budget=1KiB"])
    assert list(host_problems(config)) == []


@pytest.mark.parametrize(
    ("overrides", "num_workers", "shared"),
    [
        ((), 1, 1),
        (("cluster.gpus_per_node=2", f"{M}.optimizer.use_distributed_optimizer=true"), 2, 2),
        (("cluster.gpus_per_node=auto", f"{M}.optimizer.use_distributed_optimizer=true"), 2, 2),
        (("cluster.gpus_per_node=2", f"{M}.optimizer.use_distributed_optimizer=false"), 2, 1),
    ],
)
def test_a_share_is_of_this_machines_free_memory_where_all_workers_are_here(
    overrides: tuple[str, ...], num_workers: int, shared: int, num_parameters: int
) -> None:
    """A run of a 7B model said so when its weights were loaded."""
    ours = [ON_HOST, f"{M}.activation_offload.host_memory_budget=0.25", "policy.precision=bfloat16"]
    config: Any = load_config(FILE, [*ours, *overrides])
    least_bytes = 12 * num_parameters / shared * num_workers / 0.25
    assert list(host_problems(config, Here(num_workers, int(least_bytes * 1.01)))) == []
    (problem,) = host_problems(config, Here(num_workers, int(least_bytes * 0.99)))
    assert "(0.25 of the free " in problem
    assert "for all ranks) a rank has no room for what optimizer_cpu_offload keeps there" in problem
    assert "more ranks" not in problem
    given: Any = load_config(FILE, [*ours, *overrides, f"{M}.activation_offload.host_memory_budget=1GiB"])
    assert list(host_problems(given, Here(num_workers, 1))) == [], "a size is a size"


def test_nothing_is_said_here_of_what_leaves_no_cpu_of_too_few_workers_and_of_layers_that_are_left_out(
    tmp_path: Path,
) -> None:
    small = f"{M}.activation_offload.host_memory_budget=0.000001"
    sent: Any = load_config(FILE, ["policy.offload_optimizer_for_logprob=true", small])
    assert list(host_problems(sent, Here(1, 1 << 30, has_gpus=False))) == []
    assert list(host_problems(sent, Here(1, 1 << 30))) != []
    auto = "cluster.gpus_per_node=auto", f"{M}.optimizer.use_distributed_optimizer=true"
    for other in ("policy.generation.colocated.resources.gpus_per_node=1", f"{M}.tensor_model_parallel_size=2"):
        apart = "policy.generation.colocated.enabled=false" if "colocated" in other else other
        config: Any = load_config(FILE, [ON_HOST, small, *auto, apart, other])
        assert list(host_problems(config, Here(1, 1 << 30))) == []
        assert list(host_problems(config, Here(2, 1 << 30))) != []


@pytest.mark.parametrize("num_layers", [0, 1])
def test_layers_that_the_run_leaves_out_have_no_state(num_layers: int, tmp_path: Path) -> None:
    model = {"model_type": "glm4_moe", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model |= {"vocab_size": 64, "intermediate_size": 64, "n_routed_experts": 4, "moe_intermediate_size": 32}
    for name, further in (("with", 1), ("without", 0)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(model | {"num_nextn_predict_layers": further}))
    left_out = f"{M}.mtp_num_layers=0" if num_layers == 0 else f"{M}.mtp_num_layers=null"
    found = [problems("1KiB", f"policy.model_name={tmp_path}/{name}", left_out) for name in ("with", "without")]
    assert all(found)
    assert (found[0] == found[1]) is (num_layers == 0)


@pytest.mark.parametrize(
    ("visible", "num_gpus", "expected"),
    [
        (None, 0, 1),
        (None, 8, 8),
        (None, None, None),
        ("0,1,2,3", 0, 1),
        ("0,1,2,3", 8, 4),
        ("0,1,2,3", 2, 2),
        ("", 8, 1),
        ("-1", 8, 1),
        ("0,", 8, 1),
        ("0,-1,1", 8, 1),
        ("GPU-aa,GPU-bb", 8, 2),
        ("0", None, None),
    ],
)
def test_workers_of_this_machine_are_what_cuda_shows(
    visible: str | None, num_gpus: int | None, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(machine, "_num_gpus", lambda: num_gpus)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert machine.workers_here(1, "auto") == expected
    assert machine.workers_here(1, 3) == 3
    assert machine.workers_here(2, 3) is None
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    assert machine.workers_here(1, 3) is None


def test_a_run_says_it_before_its_workers_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("nemo_rl_offload.offload.host_memory.free_host_bytes", lambda: 1 << 20)

    def train(*_: object) -> None:
        raise ConfigError("it trains")

    monkeypatch.setattr(command_line, "_train", train)
    words = ["run", "grpo", ON_HOST, "policy.precision=float32", "--run-dir", str(tmp_path / "run")]
    assert command_line.main(words) == 2
    told = capsys.readouterr().err
    assert "host_memory_budget: 512 KiB (0.5 of the free 1.00 MiB for all ranks) a rank has no room for" in told
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert command_line.main(words) == 2
    assert "it trains" in capsys.readouterr().err


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
