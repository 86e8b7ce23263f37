"""Host memory of the driver and of every worker over a long run: `python benchmarks/host_memory.py --out FILE.json`.

Runs the tiny example of an algorithm, or `--config`, as the command line does and reads every process's own memory
(resident pages that no other process shares) after each step, beside what the workers say of their arena by class. The
growth is that of the mean of the last steps over the mean of as many steps from `--after` on; validation at the same
steps and the allocator's caches make single steps noisy.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import psutil
from common import environment

ROOT = Path(__file__).parents[1]
NUM_AVERAGED = 25


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--algorithm", default="sft", choices=("grpo", "sft", "dpo", "distillation"))
    parser.add_argument("--config", type=Path, help="in place of the tiny example")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--after", type=int, default=50, help="step from which growth counts (default: 50)")
    parser.add_argument("--out", type=Path, required=True)
    options, overrides = parser.parse_known_args()
    if options.steps < options.after + 2 * NUM_AVERAGED:
        parser.error(f"--steps: at least {2 * NUM_AVERAGED} more than --after, to see growth")
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        command = [options.algorithm, "--run-dir", str(run_dir)]
        command += ["--config", str(options.config)] if options.config else []
        command += [f"{options.algorithm}.max_num_steps={options.steps}", *overrides]
        samples = dict(_measure(command, run_dir / "metrics.jsonl"))
        for line in (run_dir / "metrics.jsonl").read_text().splitlines():
            _add_classes(samples, json.loads(line))
    growth = {role: _growth(values, options.after) for role, values in _by_role(samples).items()}
    rows = [{"step": step, **each} for step, each in sorted(samples.items())]
    result = {"algorithm": options.algorithm, "steps": options.steps, "overrides": overrides, "growth": growth}
    if options.config:
        result |= {**environment(), "config": str(options.config)}
    options.out.write_text(json.dumps(result | {"own_bytes": rows}, indent=1) + "\n")
    print(json.dumps(growth, indent=1))
    return 0


def _measure(command: list[str], metrics: Path) -> Iterator[tuple[int, dict[str, int]]]:
    """Step and bytes of each role, as the run comes past."""
    process = subprocess.Popen(
        [sys.executable, "-m", "nemo_rl_offload.cli", "run", *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
    )
    last = 0
    while process.poll() is None:
        time.sleep(0.02)
        step = _last_step(metrics)
        if step > last:
            last = step
            yield step, _own_bytes(process.pid)
    if process.returncode:
        raise SystemExit(f"the run ended with {process.returncode}")


def _last_step(file: Path) -> int:
    lines = file.read_text().splitlines() if file.exists() else []
    return max((json.loads(line)["step"] for line in lines[-2:]), default=0)


def _add_classes(samples: dict[int, dict[str, int]], line: dict[str, Any]) -> None:
    """What the fullest worker's arena held of each class in that step."""
    prefix = "memory/host_bytes/"
    if line["step"] in samples and line["prefix"] == "train":
        found = {key: int(value) for key, value in line["metrics"].items() if key.startswith(prefix)}
        samples[line["step"]] |= {f"arena: {key.removeprefix(prefix)}": value for key, value in found.items()}


def _own_bytes(driver: int) -> dict[str, int]:
    found = {"driver": psutil.Process(driver).memory_full_info().uss}
    for child in psutil.Process(driver).children(recursive=True):
        title = " ".join(child.cmdline())
        for actor in ("RankActor", "ReasoningGymEnvironment"):
            if title.startswith(f"ray::{actor}"):
                found[f"{actor} {child.pid}"] = child.memory_full_info().uss
    return found


def _by_role(samples: dict[int, dict[str, int]]) -> dict[str, dict[int, int]]:
    roles = {role for each in samples.values() for role in each}
    return {role: {step: each[role] for step, each in samples.items() if role in each} for role in sorted(roles)}


def _growth(values: dict[int, int], after: int) -> dict[str, float]:
    steps = [step for step in sorted(values) if step > after]
    first = mean(values[step] for step in steps[:NUM_AVERAGED])
    last = mean(values[step] for step in steps[-NUM_AVERAGED:])
    return {
        "first_mib": round(first / 2**20, 1),
        "last_mib": round(last / 2**20, 1),
        "growth": round(last / first - 1, 4) if first else 0.0 if last == first else float("inf"),
    }


if __name__ == "__main__":
    sys.exit(main())
