"""Whole short runs of SFT, DPO and distillation from the command line, with resuming."""

import json
from pathlib import Path
from typing import Any

import pytest
from example_runs import run_example

pytestmark = pytest.mark.slow

SMALL = {
    "sft": ("policy.train_global_batch_size=16", "policy.train_micro_batch_size=8", "data.train.size=200"),
    "grpo": ("policy.train_global_batch_size=16", "policy.train_micro_batch_size=8", "grpo.num_prompts_per_step=2"),
    "dpo": ("policy.train_global_batch_size=8", "policy.train_micro_batch_size=4"),
    "distillation": (
        "policy.train_global_batch_size=8",
        "policy.train_micro_batch_size=8",
        "distillation.num_prompts_per_step=8",
    ),
}


def run(algorithm: str, run_dir: Path, *overrides: str) -> dict[str, Any]:
    warmup = "policy.megatron_cfg.scheduler.lr_warmup_iters=1"
    arguments = [*SMALL[algorithm], warmup, f"{algorithm}.max_val_samples=16", f"{algorithm}.val_period=2", *overrides]
    done = run_example(algorithm, run_dir, *arguments)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    summary: dict[str, Any] = json.loads(done.stdout)
    return summary


@pytest.mark.sampled
@pytest.mark.parametrize(("algorithm", "metric"), [("sft", "loss"), ("dpo", "loss"), ("distillation", "accuracy")])
def test_a_run_and_what_it_writes(algorithm: str, metric: str, tmp_path: Path) -> None:
    summary = run(algorithm, tmp_path, f"{algorithm}.max_num_steps=4", "checkpointing.save_period=2")
    assert (summary["algorithm"], summary["steps"], summary["validation_metric"]) == (algorithm, 4, metric)
    offload = summary["offload"]
    assert all(offload["per_module"][module]["bytes_out"] > 0 for module in offload["modules"])
    assert offload["bytes_in"] == offload["bytes_out"]
    assert offload["ineffective_bytes"] == 0
    records = list(map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines()))
    validation = {record["step"]: record["metrics"] for record in records if record["prefix"] == "validation"}
    assert list(validation) == [0, 2, 4]
    assert summary["validation"] == {"first": validation[0][metric], "last": validation[4][metric]}
    if algorithm == "dpo":
        assert summary["validation"]["first"] == pytest.approx(0.6931, abs=1e-4)
        assert summary["data"]["data.train"]["num_samples"] == 2000
    assert summary["validation"]["last"] != summary["validation"]["first"], "the weights have changed"
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} >= {"step_4"}


TIMES = ("timing/", "tokens_per_s", "train_", "offload", "memory/")


def trained(run_dir: Path) -> dict[int, dict[str, float]]:
    """What each step's training found, without times and memory."""
    records = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return {
        record["step"]: {name: value for name, value in record["metrics"].items() if not name.startswith(TIMES)}
        for record in records
        if record["prefix"] == "train"
    }


@pytest.mark.sampled
@pytest.mark.parametrize("algorithm", ["grpo", "sft"])
def test_a_finished_run_that_is_made_longer_is_the_longer_run(algorithm: str, tmp_path: Path) -> None:
    constant = "policy.megatron_cfg.scheduler.lr_decay_style=constant"
    run(algorithm, tmp_path / "long", f"{algorithm}.max_num_steps=4", constant)
    short = run(algorithm, tmp_path / "short", f"{algorithm}.max_num_steps=2", constant, "checkpointing.is_async=true")
    longer = run(algorithm, tmp_path / "short", f"{algorithm}.max_num_steps=4", constant)
    assert trained(tmp_path / "short") == trained(tmp_path / "long")
    assert (short["steps"], longer["steps"]) == (2, 4)
    assert longer["wall_seconds"] > short["wall_seconds"]
    assert longer["offload"]["bytes_out"] > 1.5 * short["offload"]["bytes_out"]
