"""`nemo-rl-offload eval` finds what a run's validation found, of the start model and of a checkpoint."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cpu_processes import cpu_environment
from patience import PATIENCE_S

SMALL = ("grpo.max_val_samples=24", "grpo.val_batch_size=10", "cluster.gpus_per_node=1")
pytestmark = pytest.mark.slow


def command(folder: Path, *words: str, said: str = "") -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "nemo_rl_offload.cli", *words, "--format", "json"],
        cwd=folder,
        env={**os.environ, **cpu_environment()},
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    assert said in done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


@pytest.mark.sampled
def test_an_evaluation_is_a_validation(tmp_path: Path) -> None:
    few = (
        "grpo.max_num_steps=2",
        "policy.megatron_cfg.optimizer.lr=0.01",
        "policy.megatron_cfg.scheduler.lr_warmup_iters=0",
    )
    trained = command(tmp_path, "run", "grpo", "--run-dir", "trained", *SMALL, *few)["validation"]
    assert trained["first"] != trained["last"]
    once = ("eval.num_tests_per_prompt=1", "eval.k_value=1", "eval.seed=1")
    left_out = "warning: the first 24 of 200 problems are evaluated. For all: grpo.max_val_samples=200."
    start = command(tmp_path, "eval", "--run-dir", "start", *SMALL, *once, said=left_out)
    assert start["accuracy"] == start["pass_at_k"] == trained["first"]
    last = command(tmp_path, "eval", "--checkpoint", "trained/step_2", *SMALL, *once)
    assert last["accuracy"] == trained["last"]
    out = tmp_path / "results" / "eval_trained_step_2"
    assert {path.name for path in out.iterdir()} >= {"config.yaml", "evaluation.json", "samples.jsonl"}
    assert not (out / "model").exists()
    assert json.loads((out / "evaluation.json").read_text()) == last
    samples = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == last["num_problems"] == 24
    assert sum(sample["reward"] for sample in samples) / 24 == pytest.approx(last["reward"])
