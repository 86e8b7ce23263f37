"""Whole runs of GRPO on problems from a file: several turns with a function of the user's, packed, and mathematics."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from example_runs import run_example

pytestmark = pytest.mark.slow

SMALL = (
    "grpo.max_num_steps=3",
    "grpo.val_period=0",
    "grpo.max_val_samples=16",
    "grpo.num_prompts_per_step=4",
    "policy.train_global_batch_size=32",
    "policy.train_micro_batch_size=16",
    "policy.max_total_sequence_length=200",
    "loss_fn.reference_policy_kl_penalty=0.01",
    "loss_fn.entropy_coeff=0.001",
    "checkpointing.enabled=false",
    "logger.tensorboard_enabled=false",
)
FUNCTION = ("data.env_name=function", "env.function.path=examples.environments.second_try:second_try")
PACKED = ("policy.sequence_packing.enabled=true", "policy.sequence_packing.train_mb_tokens=512")


def run(run_dir: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    return run_example("grpo", run_dir, *SMALL, *overrides)


def write(path: Path, words: list[str]) -> Path:
    records = [
        {"prompt": f"Spell this word backward (example: sun -> nus): {word}", "answer": word[::-1]} for word in words
    ]
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("problems")
    train = write(
        folder / "train.jsonl", ["fear", "hall", "woy", "tree", "sand", "moon", "rain", "wind", "lake", "fire"]
    )
    validation = write(folder / "validation.jsonl", ["snow", "leaf", "road", "ship", "bird", "fish", "wolf", "bear"])
    return f"data.train.path={train}", f"data.validation.path={validation}"


@pytest.mark.sampled
def test_a_run_of_two_turns(files: tuple[str, str], tmp_path: Path) -> None:
    done = run(tmp_path, *files, *FUNCTION, *PACKED, "grpo.max_rollout_turns=2", "policy.logprob_chunk_size=32")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["steps"] == 3
    assert summary["offload"]["bytes_out"] == summary["offload"]["bytes_in"] > 0
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    train: list[dict[str, Any]] = [record["metrics"] for record in records if record["prefix"] == "train"]
    assert len(train) == 3
    for metrics in train:
        assert 1 < metrics["avg_turns_per_sample"] <= 2
        assert metrics["grad_norm"] > 0
        assert 0 <= metrics["accuracy"] <= 1
        # Generation decodes token by token with a cache; training sees the pack: the same log-probabilities.
        assert metrics["token_mult_prob_error"] == pytest.approx(1, abs=1e-3)
    assert len({metrics["grad_norm"] for metrics in train}) == 3


@pytest.mark.sampled
def test_a_mistake_in_the_function_ends_the_run(files: tuple[str, str], tmp_path: Path) -> None:
    done = run(tmp_path, *files, *FUNCTION, "env.function.path=operator:truth")
    assert done.returncode == 2, done.stderr
    assert "env.function.path: operator:truth(a, /) cannot be called as function(messages, entry" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.sampled
def test_a_run_on_mathematics(tmp_path: Path) -> None:
    lines = [json.dumps({"problem": f"{n} + {n} =", "answer": 2 * n}) for n in range(12)]
    (tmp_path / "problems.jsonl").write_text("\n".join(lines))
    problems = f"data.train.path={tmp_path / 'problems.jsonl'}"
    no_validation = ("grpo.val_at_start=false", "grpo.val_at_end=false")
    by_tokens = "policy.dynamic_batching.enabled=true"
    metric = "checkpointing.metric_name=train:reward"
    done = run(tmp_path / "run", problems, "data.env_name=math", *no_validation, by_tokens, metric)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] == 3
