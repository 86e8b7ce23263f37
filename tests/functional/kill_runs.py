"""Runs that are killed again and again end as the run that nobody disturbed.

`python tests/functional/kill_runs.py --kills 12 --out benchmarks/results/kill_runs.json` kills a worker at random
moments of a run, and the driver at random moments of saves, with SIGKILL; then compares every tensor of the last
checkpoint, weights and optimizer, with those of a run without kills. `test_kills.py` does both once.
"""

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from test_grpo_run import metrics, saved_state, start_run, wait_for, wait_until_gone

LOADED = r"(?:Loading the model[^\n]*\n)+(?:Resuming from .*step_(\d+))?"
"""Said at each start; more than once where it takes long."""
SAVE_PERIOD = 2


def settings(num_steps: int) -> tuple[str, ...]:
    return (
        f"grpo.max_num_steps={num_steps}",
        "grpo.val_period=0",
        f"checkpointing.save_period={SAVE_PERIOD}",
        "checkpointing.keep_top_k=2",
        "checkpointing.metric_name=train:loss",
        "checkpointing.higher_is_better=false",
        "fault_tolerance.max_restarts=1000",
    )


def start(run_dir: Path, num_steps: int, *overrides: str) -> "subprocess.Popen[str]":
    """Start or resume a run, and wait until Ray is up: it gives itself 30 s, too little on a machine that is busy."""
    for _ in range(5):
        process = start_run(run_dir, *settings(num_steps), *overrides, mark=str(run_dir))
        while process.poll() is None:
            if any(is_rank(child) for child in psutil.Process(process.pid).children(recursive=True)):
                return process
            time.sleep(0.2)
        _, errors = process.communicate()
        assert "timed out during startup" in errors, errors
        wait_until_gone(str(run_dir))
    raise AssertionError("Ray does not start")


def whole_run(run_dir: Path, num_steps: int) -> None:
    """A run without kills."""
    _finish(start(run_dir, num_steps))


def kill_workers(run_dir: Path, num_steps: int, num_kills: int, rng: random.Random) -> list[dict[str, Any]]:
    """One run, whose worker is killed at random moments; returns what was saved before each kill, and taken up."""
    process = start(run_dir, num_steps)
    kills: list[dict[str, Any]] = []
    for _ in range(num_kills):
        seen = _num_lines(run_dir)
        target = seen + rng.randint(1, SAVE_PERIOD + 1)
        wait_for(lambda target=target: _num_lines(run_dir) >= target, process)
        time.sleep(rng.uniform(0, 0.5))
        (rank,) = [child for child in psutil.Process(process.pid).children(recursive=True) if is_rank(child)]
        os.kill(rank.pid, signal.SIGKILL)
        kills.append({"killed": "worker", "step": _last_step(run_dir), "saved": _last_saved(run_dir)})
    errors = _finish(process)
    resumed = [int(step or 0) for step in re.findall(LOADED, errors)]
    for kill, step in zip(kills, resumed[1:], strict=True):
        kill["resumed_from"] = step
    wait_until_gone(str(run_dir))
    return kills


def kill_drivers(run_dir: Path, num_steps: int, num_kills: int, rng: random.Random) -> list[dict[str, Any]]:
    """Runs of one folder, each of which but the last is killed at a random moment of a save."""
    kills: list[dict[str, Any]] = []
    outputs: list[str] = []
    for _ in range(num_kills):
        process = start(run_dir, num_steps)
        begun = _last_saved(run_dir)
        wait_for(lambda begun=begun: _last_saved(run_dir) > begun, process)  # one more, so that there is progress
        wait_for(lambda: any(run_dir.glob("checkpoints/.step_*.partial")), process)
        time.sleep(rng.uniform(0, 0.3))
        process.kill()
        outputs.append(process.communicate()[1])
        partial = [path.name for path in run_dir.glob("checkpoints/.*")]
        kills.append({"killed": "driver", "saved": _last_saved(run_dir), "unfinished": partial})
        wait_until_gone(str(run_dir))  # Ray's agents try for 60 s to report it
    outputs.append(_finish(start(run_dir, num_steps)))
    for kill, output in zip(kills, outputs[1:], strict=True):
        kill["resumed_from"] = _resumed_from(output)[0]
    return kills


def _resumed_from(output: str) -> list[int]:
    """The step at which each start of the workers in this output went on; 0 where it began anew."""
    starts = re.findall(LOADED, output)
    return [int(step or 0) for step in starts]


def differences(run_dir: Path, whole: Path, num_steps: int) -> list[str]:
    """Names of the tensors of the last checkpoint, and of the steps whose metrics, differ between both runs."""
    found, expected = saved_state(run_dir, num_steps), saved_state(whole, num_steps)
    assert len(expected) > 50
    assert found.keys() == expected.keys()
    logged, expected_logged = _metrics_of_training(run_dir), _metrics_of_training(whole)
    assert logged.keys() == expected_logged.keys()
    return [name for name in expected if found[name] != expected[name]] + [
        f"metrics of step {key[0]}" for key in expected_logged if logged[key] != expected_logged[key]
    ]


def _metrics_of_training(run_dir: Path) -> dict[tuple[int, str], dict[str, float]]:
    """Without peaks, which begin anew with each process, and without what waited where."""
    return {
        key: {name: value for name, value in values.items() if "peak" not in name and not name.startswith("memory/")}
        for key, values in metrics(run_dir).items()
    }


def _finish(process: "subprocess.Popen[str]") -> str:
    _, errors = process.communicate(timeout=1800)
    assert process.returncode == 0, errors
    return errors


def is_rank(process: psutil.Process) -> bool:
    try:
        return any(part.startswith("ray::RankActor") for part in process.cmdline())
    except psutil.Error:  # it has ended meanwhile
        return False


def _num_lines(run_dir: Path) -> int:
    file = run_dir / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


def _last_step(run_dir: Path) -> int:
    return int(json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])["step"])


def _last_saved(run_dir: Path) -> int:
    return max((int(path.name.removeprefix("step_")) for path in run_dir.glob("checkpoints/step_*")), default=0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=12, help="of the worker, and as many of the driver")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    num_steps = (SAVE_PERIOD + 2) * options.kills
    result: dict[str, Any] = {"steps": num_steps, "save_period": SAVE_PERIOD, "seed": options.seed}
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "whole"
        whole_run(whole, num_steps)
        for name, kill in (("workers", kill_workers), ("drivers", kill_drivers)):
            run_dir = Path(folder) / name
            kills = kill(run_dir, num_steps, options.kills, random.Random(options.seed))
            result[name] = {
                "kills": kills,
                "lost_steps_that_were_saved": sum(each["resumed_from"] < each["saved"] for each in kills),
                "differences_from_the_whole_run": differences(run_dir, whole, num_steps),
            }
            options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(options.out.read_text())
    return int(any(result[name]["differences_from_the_whole_run"] for name in ("workers", "drivers")))


if __name__ == "__main__":
    sys.exit(main())
