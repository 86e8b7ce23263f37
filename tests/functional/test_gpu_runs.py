"""Whole runs of the command line on GPUs: Ray's workers, NCCL between them, and offloading through pinned memory."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from example_runs import run_example

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CFG = "policy.megatron_cfg"
SMALL = {
    "sft": ("sft.max_num_steps=4", "checkpointing.save_period=4", f"{CFG}.scheduler.lr_warmup_iters=1"),
    "grpo": ("grpo.max_num_steps=2", "grpo.max_val_samples=16", "checkpointing.save_period=2"),
}
LAYOUTS = {
    "one": ("cluster.gpus_per_node=1",),
    "dp2": (
        "cluster.gpus_per_node=2",
        f"{CFG}.optimizer.use_distributed_optimizer=true",
        "policy.train_micro_batch_size=16",
    ),
    "pp2": (
        "cluster.gpus_per_node=2",
        f"{CFG}.pipeline_model_parallel_size=2",
        f"{CFG}.num_layers_in_first_pipeline_stage=2",
    ),
}
ALIKE = 1e-4
"""Relative: kernels that add up atomically give other last bits in each run, with or without offloading."""


def run(algorithm: str, layout: str, run_dir: Path, *overrides: str) -> tuple[dict[str, Any], list[float]]:
    """The summary of a run, and its losses by step."""
    done = run_example(algorithm, run_dir, *SMALL[algorithm], *LAYOUTS[layout], *overrides)
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    losses = [record["metrics"]["loss"] for record in records if record["prefix"] == "train"]
    return json.loads(done.stdout), losses


@pytest.mark.parametrize("layout", LAYOUTS)
def test_offloading_changes_no_loss(layout: str, tmp_path: Path) -> None:
    if layout != "one" and torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    summary, losses = run("sft", layout, tmp_path / "on")
    assert summary["device"] == "cuda"
    assert summary["world_size"] == (1 if layout == "one" else 2)
    totals = summary["offload"]
    assert totals["bytes_out"] == totals["bytes_in"] + totals["returned_bytes"]
    assert totals["bytes_in"] > 0
    assert summary["memory"]["peak_device_bytes"] > 0
    plain, plain_losses = run("sft", layout, tmp_path / "off", f"{CFG}.fine_grained_activation_offloading=false")
    assert plain["device"] == "cuda"
    assert losses == pytest.approx(plain_losses, rel=ALIKE)
    assert len(losses) == 4


@pytest.mark.parametrize("layout", ["one", "dp2"])
def test_grpo(layout: str, tmp_path: Path) -> None:
    if layout != "one" and torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    summary, losses = run("grpo", layout, tmp_path / "run")
    assert summary["device"] == "cuda"
    assert len(losses) == 2
    assert summary["offload"]["bytes_out"] > 0
    assert 0 <= summary["validation"]["last"] <= 1
