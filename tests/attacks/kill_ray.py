"""Ray's own processes that are killed: the run starts Ray anew from the last checkpoint, or says why it ends.

`python tests/attacks/kill_ray.py --cases 4 --seed 0` kills gcs_server or the raylet of runs with one restart at a
random moment, and the other one after the restart. With `--starts 8` it kills one of them while Ray first starts.
"""

import argparse
import os
import random
import re
import signal
import sys
import tempfile
import time
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "functional"))

from patience import PATIENCE_S
from test_grpo_run import start_run, wait_for, wait_until_gone

NAMES = ("gcs_server", "raylet")


def faults_of(run_dir: Path, first: str, second: str, after_s: float) -> list[str]:
    """Kill the first process so long after a checkpoint, the second after that of the restart; what was wrong then."""
    process = start_run(
        run_dir,
        *("grpo.max_num_steps=1000", "grpo.val_period=0", "checkpointing.keep_top_k=1"),
        "fault_tolerance.max_restarts=1",
        mark=str(run_dir),
    )
    for name in (first, second):
        before = _last_step(run_dir)
        wait_for(lambda before=before: _last_step(run_dir) > before, process)
        time.sleep(after_s)
        last = _last_step(run_dir)
        (daemon,) = (child for child in psutil.Process(process.pid).children() if name in child.name())
        os.kill(daemon.pid, signal.SIGKILL)
    _, errors = process.communicate(timeout=PATIENCE_S)
    wait_until_gone(str(run_dir))
    said = f"Ray's process {second} (pid {daemon.pid}), which all workers depend on, was killed by signal 9."
    resumed = [int(step) for step in re.findall(r"Resuming from \S*step_(\d+)", errors)]
    last_saved = f"goes on from the last checkpoint, {run_dir}/checkpoints/step_{_last_step(run_dir)}."
    log = run_dir / "error.log"
    checks = {
        f"exit code {process.returncode}": process.returncode == 2,
        "no explanation": f"error: {said}" in errors and last_saved in errors,
        "text of Ray": "Traceback" not in errors and "rpc_client" not in errors,
        "no restart": f"Ray's process {first} " in errors and len(resumed) == 1,
        "a lost checkpoint": _last_step(run_dir) >= last,
        "no error.log": log.exists() and said in log.read_text(),
    }
    return [f"{fault}: {errors}" for fault, holds in checks.items() if not holds]


def faults_of_start(run_dir: Path, name: str, after_s: float) -> list[str]:
    """Kill the process so long after it has appeared, while Ray starts; what was wrong then."""
    process = start_run(run_dir, "grpo.max_num_steps=1", "grpo.val_period=0", mark=str(run_dir))
    driver = psutil.Process(process.pid)
    while not (daemons := [child.pid for child in driver.children() if _program(child) == name]):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    time.sleep(after_s)
    os.kill(daemons[0], signal.SIGKILL)
    _, errors = process.communicate(timeout=PATIENCE_S)
    wait_until_gone(str(run_dir))
    if "Loading the model on 1 cpu worker(s)" in errors:
        return []  # it was up before
    checks = {
        f"exit code {process.returncode}": process.returncode == 2,
        "no explanation": f"error: Could not start a local Ray cluster: Ray's process {name} (pid {daemons[0]})"
        in errors,
        "text of Ray": "Traceback" not in errors and "rpc_client" not in errors,
        "no error.log": (run_dir / "error.log").exists(),
    }
    return [f"{name} after {after_s} s: {fault}: {errors}" for fault, holds in checks.items() if not holds]


def _program(process: psutil.Process) -> str:
    try:
        return Path(process.cmdline()[0]).name
    except (psutil.Error, IndexError):  # it ends, or has just begun
        return ""


def _last_step(run_dir: Path) -> int:
    return max((int(path.name.removeprefix("step_")) for path in run_dir.glob("checkpoints/step_*")), default=0)


def attack(num_cases: int, num_starts: int, seed: int) -> list[str]:
    """Faults of all cases."""
    rng, faults = random.Random(seed), []
    for _ in range(num_starts):
        with tempfile.TemporaryDirectory() as folder:
            faults += faults_of_start(Path(folder) / "run", rng.choice(NAMES), rng.uniform(0, 3))
    for _ in range(num_cases):
        first, second = rng.sample(NAMES, 2)
        with tempfile.TemporaryDirectory() as folder:
            faults += faults_of(Path(folder) / "run", first, second, rng.uniform(0, 1))
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=4)
    parser.add_argument("--starts", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    faults = attack(options.cases, options.starts, options.seed)
    for fault in faults:
        print(fault)
    print(f"{options.cases} runs, whose Ray was killed twice each, {options.starts} starts; {len(faults)} faults")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
