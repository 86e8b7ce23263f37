"""SIGTERM in the middle of an asynchronous save: what is on the disk afterwards is whole, and nothing is lost.

`python tests/attacks/sigterm_in_saves.py --cases 12` ends one run again and again at random moments of its saves: with
time for a checkpoint or without, with one signal or two, sent to the driver or to all its processes. Each time the run
ends with code 130, no process is left, each checkpoint is what its manifest says, and the next start goes on from the
newest of them.
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

sys.path.insert(0, str(Path(__file__).parents[1] / "functional"))

from kill_runs import start
from patience import PATIENCE_S
from test_grpo_run import leftovers, wait_for, wait_until_gone

from nemo_rl_offload.runs.manifest import check_contents
from nemo_rl_offload.runs.run_directory import CHECKPOINTS, POLICY, read_checkpoint, steps_in

NUM_STEPS = 1000
GRACE_PERIODS_S = (0, 0.2, 25)


def end_runs_in_saves(run_dir: Path, num_cases: int, rng: random.Random) -> list[str]:
    """End one run that often; returns what went wrong."""
    wrong: list[str] = []
    newest = 0
    for number in range(num_cases):
        grace_period_s, to_all, twice = rng.choice(GRACE_PERIODS_S), rng.random() < 0.5, rng.random() < 0.3
        case = f"case {number} (grace_period_s {grace_period_s}, to all {to_all}, twice {twice})"
        process = start(
            run_dir,
            NUM_STEPS,
            "checkpointing.is_async=true",
            "checkpointing.save_period=1",
            f"fault_tolerance.grace_period_s={grace_period_s}",
        )
        wait_for(lambda before=newest: max(_steps(run_dir), default=0) > before, process)
        wait_for(lambda: any(run_dir.glob(f"{CHECKPOINTS}/.step_*.partial")), process)
        time.sleep(rng.uniform(0, 0.5))
        saved = max(_steps(run_dir))
        send = os.killpg if to_all else os.kill
        send(process.pid, signal.SIGTERM)
        if twice:
            time.sleep(rng.uniform(0, 0.1))
            send(process.pid, signal.SIGTERM)
        _, errors = process.communicate(timeout=PATIENCE_S)
        said = re.escape(f"Interrupted. The same command goes on from the last checkpoint, {run_dir}/checkpoints/step_")
        is_said = re.search(said + r"\d+\.\n$", errors) is not None
        if process.returncode != 130 or not is_said or "Traceback" in errors:
            wrong.append(f"{case}: ended with {process.returncode}: {errors[-2000:]}")
        if newest and f"Resuming from {run_dir / CHECKPOINTS / f'step_{newest}'} " not in errors:
            wrong.append(f"{case}: did not go on from step {newest}: {errors[-2000:]}")
        try:
            wait_until_gone(str(run_dir))
        except AssertionError:
            wrong.append(f"{case}: left processes: {leftovers(str(run_dir))}")
        newest = max(_steps(run_dir))
        if newest < saved:
            wrong.append(f"{case}: step {saved} was saved and is gone")
        if partial := [path.name for path in run_dir.glob(f"{CHECKPOINTS}/.*")]:
            wrong.append(f"{case}: left {partial}")
        wrong += [f"{case}: {problem}" for step in _steps(run_dir) for problem in _damage(run_dir, step)]
    return wrong


def _steps(run_dir: Path) -> list[int]:
    return steps_in(run_dir / CHECKPOINTS)


def _damage(run_dir: Path, step: int) -> list[str]:
    """Why a checkpoint is not what was written; reads every file."""
    try:
        folder, state, files = read_checkpoint(run_dir / CHECKPOINTS / f"step_{step}")
        check_contents(folder / POLICY, files, files)
    except Exception as error:  # noqa: BLE001 - any is a finding
        return [repr(error)]
    return [] if state["step"] == step else [f"step_{step} holds step {state['step']}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        wrong = end_runs_in_saves(Path(folder) / "run", options.cases, random.Random(options.seed))
    print("\n".join([*wrong, f"sigterm_in_saves: {options.cases} cases, {len(wrong)} problems"]))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
