"""Whole runs of the command line on GPUs: Ray's workers, NCCL between them, and offloading through pinned memory."""

import importlib.util
import json
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from example_runs import run_example
from models import write_model

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CFG = "policy.megatron_cfg"
SMALL = {
    "sft": ("sft.max_num_steps=4", "checkpointing.save_period=4", f"{CFG}.scheduler.lr_warmup_iters=1"),
    "grpo": ("grpo.max_num_steps=2", "grpo.max_val_samples=16", "checkpointing.save_period=2"),
}
TWO = "cluster.gpus_per_node=2"
LAYOUTS: dict[str, tuple[str, ...]] = {
    "one": ("cluster.gpus_per_node=1",),
    "dp2": (TWO, f"{CFG}.optimizer.use_distributed_optimizer=true", "policy.train_micro_batch_size=16"),
    "pp2": (TWO, f"{CFG}.pipeline_model_parallel_size=2"),
    "tp2": (TWO, f"{CFG}.tensor_model_parallel_size=2", f"{CFG}.sequence_parallel=true"),
    "cp2": (TWO, f"{CFG}.context_parallel_size=2", "policy.dynamic_batching.enabled=true"),
    "ep2": (TWO, f"{CFG}.expert_model_parallel_size=2", f"{CFG}.moe_token_dispatcher_type=allgather"),
}
PLAIN = f"{CFG}.fine_grained_activation_offloading=false"
ALIKE = 1e-4
"""Relative: kernels that add up atomically give other last bits in each run, with or without offloading."""
ALIKE_IN_BFLOAT16 = 1e-2
"""Relative: likewise, where the last bit is 2^-8."""
Losses = list[float]
BESIDE_A_STASH = ("attn_norm", "core_attn", "mlp_norm")
TE_MODULES = ("qkv_linear", "core_attn", "attn_proj")


def run_with(algorithm: str, run_dir: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    return run_example(algorithm, run_dir, *SMALL[algorithm], *overrides)


def run(algorithm: str, layout: str, run_dir: Path, *overrides: str) -> tuple[dict[str, Any], Losses]:
    """The summary of a run on GPUs, and its losses by step."""
    done = run_with(algorithm, run_dir, *LAYOUTS[layout], *overrides)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["device"], summary["world_size"]) == ("cuda", 1 if layout == "one" else 2)
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return summary, [record["metrics"]["loss"] for record in records if record["prefix"] == "train"]


def need_gpus(layout: str) -> None:
    if layout != "one" and torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")


def random_model(family: str, folder: Path) -> list[str]:
    """Overrides for a small model with random weights."""
    path = write_model(family, folder / "model")
    return [f"policy.{key}={path}" for key in ("model_name", "tokenizer.name")]


def check_offloaded(summary: dict[str, Any]) -> None:
    """Something left, and came back or was taken back on its way."""
    totals = summary["offload"]
    assert totals["bytes_out"] == totals["bytes_in"] + totals["returned_bytes"]
    assert totals["bytes_in"] > 0


def run_both(layout: str, folder: Path, *overrides: str) -> tuple[dict[str, Any], Losses, Losses]:
    """The summary of an SFT run with offloading; its losses, and those of one without, at the same time."""
    with ThreadPoolExecutor() as threads:
        plain = threads.submit(run, "sft", layout, folder / "off", *overrides, PLAIN)
        summary, losses = run("sft", layout, folder / "on", *overrides)
        return summary, losses, plain.result()[1]


@pytest.mark.parametrize("layout", ["one", "dp2", "pp2", "tp2", "cp2"])
def test_offloading_changes_no_loss(layout: str, tmp_path: Path) -> None:
    need_gpus(layout)
    summary, losses, plain_losses = run_both(layout, tmp_path)
    check_offloaded(summary)
    assert 0 < summary["memory"]["peak_device_bytes"] <= summary["memory"]["peak_reserved_bytes"]
    assert losses == pytest.approx(plain_losses, rel=ALIKE)
    assert len(losses) == 4


@pytest.mark.parametrize("layout", ["one", "dp2"])
def test_grpo(layout: str, tmp_path: Path) -> None:
    need_gpus(layout)
    summary, losses = run("grpo", layout, tmp_path / "run")
    assert len(losses) == 2
    check_offloaded(summary)
    assert 0 <= summary["validation"]["last"] <= 1


@pytest.mark.parametrize("layout", ["one", "ep2"])
def test_experts_with_a_stash(layout: str, tmp_path: Path) -> None:
    need_gpus(layout)
    stash = (
        "moe_paged_stash=true",
        "moe_expert_rank_capacity_factor=2.0",
        f"offload_modules=[{','.join(BESIDE_A_STASH)}]",
    )
    model = random_model("qwen3_moe", tmp_path)
    summary, losses = run("sft", layout, tmp_path / "run", *(f"{CFG}.{text}" for text in stash), *model)
    assert len(losses) == 4
    assert summary["paged_stash"]["steps"] == 4
    check_offloaded(summary)


@pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is None, reason="needs Transformer Engine")
def test_transformer_engine_in_bfloat16(tmp_path: Path) -> None:
    settings = (f"{CFG}.transformer_impl=transformer_engine", "policy.precision=bfloat16")
    modules = f"{CFG}.offload_modules=[{','.join(TE_MODULES)}]"
    summary, losses, plain_losses = run_both("one", tmp_path, *settings, modules)
    check_offloaded(summary)
    assert losses == pytest.approx(plain_losses, rel=ALIKE_IN_BFLOAT16)


def test_a_finished_run_is_made_longer(tmp_path: Path) -> None:
    constant = f"{CFG}.scheduler.lr_decay_style=constant"
    with ThreadPoolExecutor() as threads:
        whole = threads.submit(run, "sft", "one", tmp_path / "whole", constant)
        run("sft", "one", tmp_path / "run", constant, "sft.max_num_steps=2", "checkpointing.is_async=true")
        summary, losses = run("sft", "one", tmp_path / "run", constant)
        assert summary["steps"] == 4
        assert losses == pytest.approx(whole.result()[1], rel=ALIKE)


def test_a_step_without_memory_says_what_to_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    total_bytes = torch.cuda.get_device_properties(0).total_memory
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", f"per_process_memory_fraction:{(96 << 20) / total_bytes:.6f}")
    done = run_with("sft", tmp_path / "run", *LAYOUTS["one"], PLAIN, "sft.val_at_start=false")
    assert done.returncode == 2, done.stderr
    assert re.search(r"out of device memory in a training step: torch held up to 0\.\d+ GiB of the ", done.stderr)
    assert "train_micro_batch_size=" in done.stderr
    assert "Traceback" not in done.stderr
