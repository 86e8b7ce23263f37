"""Whole runs that go on with other values, or begin with another run's checkpoint."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE_S

from nemo_rl_offload.config.loader import PROJECT_ROOT

pytestmark = pytest.mark.slow
SMALL = (
    *("grpo.val_at_start=false", "grpo.val_at_end=false", "grpo.val_period=0", "checkpointing.save_period=2"),
    *("policy.megatron_cfg.scheduler.lr_warmup_iters=0", "checkpointing.metric_name=null", "cluster.gpus_per_node=1"),
    *("grpo.num_prompts_per_step=2", "policy.train_global_batch_size=16", "policy.train_micro_batch_size=8"),
)
LR = "policy.megatron_cfg.optimizer.lr"


def run(folder: Path, *arguments: str) -> str:
    """Run GRPO's example; returns what was said."""
    done = subprocess.run(
        [sys.executable, "-m", "nemo_rl_offload.cli", "run", "grpo", "--run-dir", str(folder), *SMALL, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
        env={**os.environ, "PYTHONPATH": str(PROJECT_ROOT), "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def trained(folder: Path) -> dict[int, dict[str, Any]]:
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {record["step"]: record["metrics"] for record in records if record["prefix"] == "train"}


@pytest.mark.sampled
def test_a_run_is_changed_and_branched(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    run(first, "grpo.max_num_steps=2", f"{LR}=3e-4")
    said = run(first, "grpo.max_num_steps=3", f"{LR}=1e-4", "logger.profile.steps=[3]")
    assert f"From step 2 on, {LR} is 0.0001 instead of 0.0003." in said
    assert "the learning rate goes on at 0.0001 after 2 optimizer steps" in said
    assert [metrics["lr"] for metrics in trained(first).values()] == pytest.approx([3e-4, 3e-4, 1e-4])
    assert (first / "profile" / "step_3_rank_0.json.gz").exists()
    penalty = "loss_fn.reference_policy_kl_penalty=0.1"
    begin = ("--from-checkpoint", str(first / "step_3"), "--weights-only", penalty)
    run(second, "grpo.max_num_steps=2", *begin)
    kl_penalties = [metrics["kl_penalty"] for metrics in trained(second).values()]
    assert kl_penalties[0] == pytest.approx(0, abs=1e-6), "the reference model has the checkpoint's weights"
    assert kl_penalties[1] > 1e-6
    run(second, "grpo.max_num_steps=3", *begin)
    assert trained(second)[3]["kl_penalty"] > 1e-6, "and keeps them where the run goes on"
