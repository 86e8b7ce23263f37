"""Whole runs of the command line on the tiny exemplar, on the CPU: what they write, interruption, resuming."""

import gc
import io
import json
import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from cpu_processes import cpu_environment
from patience import PATIENCE_S, eventually
from torch.distributed.checkpoint.filesystem import FileSystemReader

from nemo_rl_offload.batching.batch import Batch
from nemo_rl_offload.config.loader import PROJECT_ROOT, load_config
from nemo_rl_offload.losses.reduction import normalizers
from nemo_rl_offload.policy.worker import PolicyWorker

SMALL = (
    "grpo.max_num_steps=4",
    "grpo.val_period=2",
    "grpo.max_val_samples=16",
    "grpo.num_prompts_per_step=2",
    "data.validation.size=16",
    "policy.train_global_batch_size=16",
    "policy.train_micro_batch_size=8",
    "checkpointing.save_period=2",
    "checkpointing.keep_top_k=null",
    "loss_fn.reference_policy_kl_penalty=0.05",
)


def start_run(run_dir: Path, *overrides: str, mark: str = "none") -> subprocess.Popen[str]:
    """Start a small run in a process group of its own; `mark` is found again by `leftovers`."""
    command = [sys.executable, "-m", "nemo_rl_offload.cli", "run", "grpo", *SMALL, *overrides]
    environment = {**os.environ, **cpu_environment(), "OMP_NUM_THREADS": "1", "RUN_MARK": mark}
    return subprocess.Popen(
        [*command, "--format", "json", "--run-dir", str(run_dir)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )


def leftovers(mark: str) -> list[str]:
    """Return the command lines of processes that a run with this mark started and that are still there."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("RUN_MARK") == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()) or process.name())
        except psutil.Error:
            continue
    return found


def wait_for(condition: Callable[[], Any], process: subprocess.Popen[str]) -> None:
    """Wait until `condition` holds, while the run goes on."""

    def holds() -> bool:
        if condition():
            return True
        assert process.poll() is None, process.communicate()
        return False

    assert eventually(holds, period_s=0.02)


def metrics(run_dir: Path) -> dict[tuple[int, str], dict[str, float]]:
    """Return the metrics that do not measure time; of a step that was repeated, the last."""
    records = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return {
        (record["step"], record["prefix"]): {
            name: value for name, value in record["metrics"].items() if "timing" not in name and "per_s" not in name
        }
        for record in records
    }


def saved_state(run_dir: Path, step: int = 4) -> dict[str, Any]:
    """Return every tensor of a checkpoint, weights and optimizer, as bytes, and other state as text."""
    folder = run_dir / "checkpoints" / f"step_{step}" / "policy"
    state = {}
    for index, place in FileSystemReader(folder).read_metadata().storage_data.items():
        content = (folder / place.relative_path).read_bytes()[place.offset : place.offset + place.length]
        value = torch.load(io.BytesIO(content), weights_only=False)
        state[f"{index.fqn} {index.offset}"] = content if isinstance(value, torch.Tensor) else repr(value)
    return state


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A shell starts background jobs with SIGINT ignored, and what they start inherits that: the run would go on."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, handler)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """The folder, standard output and standard error of a run that went through."""
    run_dir = tmp_path_factory.mktemp("finished") / "a run"
    process = start_run(run_dir, mark=str(run_dir))
    output, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, errors
    wait_until_gone(str(run_dir))
    return run_dir, output, errors


def test_what_a_run_writes(finished: tuple[Path, str, str]) -> None:
    run_dir, output, errors = finished
    summary = json.loads(output)
    assert summary == json.loads((run_dir / "summary.json").read_text())
    expected = {"algorithm": "grpo", "steps": 4, "seed": 1, "world_size": 1}
    assert {name: summary[name] for name in expected} == expected
    assert summary["wall_seconds"] > 0
    assert 0 <= summary["validation"]["first"] <= 1
    assert 0 <= summary["validation"]["last"] <= 1
    assert isinstance(summary["train"]["loss"], float)
    offload = summary["offload"]
    assert offload["engine"] == "native"
    assert offload["modules"] == ["attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm"]
    assert all(offload["per_module"][module]["bytes_out"] > 0 for module in offload["modules"])
    assert offload["bytes_out"] == offload["bytes_in"] == sum(m["bytes_out"] for m in offload["per_module"].values())
    assert 0 < offload["peak_host_bytes"] < offload["bytes_out"]
    assert (offload["denied_bytes"], offload["ineffective_bytes"], offload["demand_reloads"]) == (0, 0, 0)
    assert "peak_device_bytes" in summary["memory"]
    assert {path.name for path in run_dir.iterdir()} - {".lock"} == {
        "config.yaml",
        "metrics.jsonl",
        "samples.jsonl",
        "summary.json",
        "tensorboard",
        "checkpoints",
        "memory_trace.json",
        "inputs.json",
        "warnings.log",  # of Transformer Engine, which these tests hide
    }
    assert {path.name for path in (run_dir / "checkpoints").iterdir()} == {"step_2", "step_4"}
    assert any((run_dir / "tensorboard").iterdir())
    assert [line for line in errors.splitlines() if line.startswith("step ")][-1].startswith("step 4/4")
    assert "Traceback" not in errors


def test_metrics_of_a_run(finished: tuple[Path, str, str]) -> None:
    logged = metrics(finished[0])
    assert set(logged) == {(step, "train") for step in (1, 2, 3, 4)} | {(step, "validation") for step in (0, 2, 4)}
    for step in (1, 2, 3, 4):
        train = logged[step, "train"]
        assert train["lr"] == pytest.approx(3e-4 * (step - 1) / 5, rel=1e-6)  # Megatron warms up from step 0
        assert train["token_mult_prob_error"] == pytest.approx(1, abs=1e-4)
        assert train["offloaded_bytes"] > 0
        assert train["grad_norm"] > 0
    # The first step is one of learning rate 0, so the policy leaves the reference with the second.
    assert [logged[step, "train"]["kl_penalty"] for step in (1, 2)] == [0, 0]
    assert all(0 < logged[step, "train"]["kl_penalty"] < 0.1 for step in (3, 4))
    summary = json.loads((finished[0] / "summary.json").read_text())
    assert summary["validation"] == {
        "first": logged[0, "validation"]["accuracy"],
        "last": logged[4, "validation"]["accuracy"],
    }


def kill_after_step_2(run_dir: Path, mark: str) -> None:
    process = start_run(run_dir, mark=mark)
    wait_for((run_dir / "checkpoints" / "step_2").exists, process)
    process.kill()
    process.communicate()
    wait_until_gone(mark)


@pytest.mark.sampled
@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_end(finished: tuple[Path, str, str], tmp_path: Path) -> None:
    run_dir, mark = tmp_path / "run", str(tmp_path)
    kill_after_step_2(run_dir, mark)
    assert not (run_dir / "summary.json").exists()
    resumed = start_run(run_dir, mark=mark)
    output, errors = resumed.communicate(timeout=PATIENCE_S)
    assert resumed.returncode == 0, errors
    assert f"Resuming from {run_dir}/checkpoints/step_2" in errors
    summary, expected_summary = json.loads(output), json.loads(finished[1])
    assert summary["steps"] == 4
    assert summary["offload"]["per_module"] == expected_summary["offload"]["per_module"], "of both processes"
    assert metrics(run_dir) == metrics(finished[0])
    resumed_state, expected_state = saved_state(run_dir), saved_state(finished[0])
    assert len(expected_state) > 50
    assert [name for name in expected_state if resumed_state[name] != expected_state[name]] == []


@pytest.mark.sampled
@pytest.mark.slow
def test_a_killed_run_goes_on_in_another_layout(finished: tuple[Path, str, str], tmp_path: Path) -> None:
    run_dir, mark = tmp_path / "run", str(tmp_path)
    kill_after_step_2(run_dir, mark)
    stages = ("pipeline_model_parallel_size=2", "num_layers_in_first_pipeline_stage=1")
    two = ("cluster.gpus_per_node=2", *(f"policy.megatron_cfg.{key}" for key in stages))
    resumed = start_run(run_dir, *two, "policy.megatron_cfg.fine_grained_activation_offloading=false", mark=mark)
    output, errors = resumed.communicate(timeout=PATIENCE_S)
    assert resumed.returncode == 0, errors
    assert f"Resuming from {run_dir}/checkpoints/step_2" in errors
    assert json.loads(output)["world_size"] == 2
    expected, found = metrics(finished[0]), metrics(run_dir)
    assert found.keys() == expected.keys()
    for step in (3, 4):
        for name in ("reward", "grad_norm", "accuracy", "lr"):
            # Sums in another order; the same responses were sampled.
            assert found[step, "train"][name] == pytest.approx(expected[step, "train"][name], rel=1e-3)


def wait_until_gone(mark: str) -> None:
    """Assert that no process of a run with this mark is left, in a while."""
    assert eventually(lambda: not leftovers(mark), period_s=0.2), leftovers(mark)


SAMPLED = (pytest.mark.slow, pytest.mark.sampled)


@pytest.mark.sampled
@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(
    ("signal_number", "to_group", "when"),
    [
        pytest.param(signal.SIGINT, True, "training", marks=SAMPLED),
        pytest.param(signal.SIGINT, False, "loading", marks=SAMPLED),
        pytest.param(signal.SIGTERM, False, "training", marks=SAMPLED),
        pytest.param(signal.SIGTERM, True, "training", marks=SAMPLED),
        pytest.param(signal.SIGTERM, False, "loading", marks=SAMPLED),
        pytest.param(signal.SIGINT, True, "starting", marks=SAMPLED),
    ],
)
def test_interrupted(signal_number: int, to_group: bool, when: str, tmp_path: Path) -> None:
    run_dir, mark = tmp_path / "run", str(tmp_path)
    process = start_run(run_dir, "grpo.max_num_steps=1000", mark=mark)
    if when == "training":
        wait_for((run_dir / "checkpoints" / "step_2").exists, process)
    else:
        errors_so_far = process.stderr
        assert errors_so_far is not None
        words, seconds = {"loading": ("Loading the model", 1.0), "starting": ("Starting Ray", 0.3)}[when]
        wait_for(lambda: words in errors_so_far.readline(), process)
        time.sleep(seconds)
    (os.killpg if to_group else os.kill)(process.pid, signal_number)
    output, errors = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, output) == (130, "")
    last = max((path.name for path in run_dir.glob("checkpoints/step_*")), key=lambda name: int(name[5:]), default="")
    hint = f" The same command goes on from the last checkpoint, {run_dir}/checkpoints/{last}."
    assert bool(last) == (when == "training")
    assert errors.endswith(f"Interrupted.{hint if last else ' There is no checkpoint yet, from which to go on.'}\n")
    assert "Traceback" not in errors
    wait_until_gone(mark)
    assert not list((run_dir / "checkpoints").glob(".*"))


@pytest.mark.parametrize("distributed_optimizer", ["false", "true"])
def test_reference_weights_come_and_go(distributed_optimizer: str, megatron_process_group: None) -> None:
    overrides = (
        "policy.megatron_cfg.fine_grained_activation_offloading=false",
        "policy.megatron_cfg.scheduler.lr_warmup_iters=0",
        f"policy.megatron_cfg.optimizer.use_distributed_optimizer={distributed_optimizer}",
    )
    config: Any = load_config(PROJECT_ROOT / "examples/configs/grpo_tiny.yaml", overrides)
    model = PROJECT_ROOT / config["policy"]["model_name"]
    worker = PolicyWorker(config["policy"], model, seed=1, num_steps=3, keep_reference=True)
    batch = recorded_batch()
    at_start = worker.get_logprobs(batch)
    assert np.array_equal(worker.get_reference_policy_logprobs(batch), at_start)
    batch["prev_logprobs"] = torch.from_numpy(at_start)
    for _ in range(2):
        worker.train(batch, "clipped_pg", config["loss_fn"], normalizers(batch))
    weights = [weight for module in worker._whole_model().modules for weight in module.parameters()]
    trained = [weight.detach().clone() for weight in weights]
    assert np.array_equal(worker.get_reference_policy_logprobs(batch), at_start)
    assert all(map(torch.equal, weights, trained))
    assert not np.array_equal(worker.get_logprobs(batch), at_start)
    batch["prev_logprobs"] = batch["prev_logprobs"] - 0.5
    worker.train(batch, "clipped_pg", config["loss_fn"], normalizers(batch))
    assert np.array_equal(worker.get_reference_policy_logprobs(batch), at_start)


class Cycle:
    """Garbage for the collector alone."""

    def __init__(self) -> None:
        self.me = self


def test_a_full_collection_looks_at_no_model_after_the_first_step(megatron_process_group: None) -> None:
    config: Any = load_config(PROJECT_ROOT / "examples/configs/grpo_tiny.yaml")
    model = PROJECT_ROOT / config["policy"]["model_name"]
    worker = PolicyWorker(config["policy"], model, seed=1, num_steps=3, keep_reference=False)
    batch = recorded_batch()
    batch["prev_logprobs"] = torch.from_numpy(worker.get_logprobs(batch))
    gc.unfreeze()
    try:
        worker.train(batch, "clipped_pg", config["loss_fn"], normalizers(batch))
        assert len(gc.get_objects()) < gc.get_freeze_count() / 10
        later = Cycle()
        worker.train(batch, "clipped_pg", config["loss_fn"], normalizers(batch))
        gone = weakref.ref(later)
        del later
        gc.collect()
        assert gone() is None, "what comes after the first step is collected as ever"
    finally:
        gc.unfreeze()


def recorded_batch() -> Batch:
    generator = torch.Generator().manual_seed(0)
    return {
        "input_ids": torch.randint(3, 250, (4, 10), generator=generator),
        "input_lengths": torch.full((4,), 10),
        "token_mask": (torch.arange(10) >= 4).float().expand(4, 10),
        "sample_mask": torch.ones(4),
        "advantages": torch.tensor([[1.0], [-1.0], [0.5], [-0.5]]).expand(4, 10),
    }
