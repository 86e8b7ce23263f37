"""What runs learned: their validation by step, seconds, and samples before and after, from their run directories.

What supervised runs answer is asked of their weights afterwards: `--evaluations` are run directories of
`nemo-rl-offload eval`, one for each run.

    nemo-rl-offload run grpo --config examples/smollm2/grpo_gpu.yaml --run-dir results/seed1 grpo.seed=1
    python benchmarks/learning.py results/seed1 results/seed2 --name smollm2_grpo --title "SmolLM2, sums by GRPO" \\
        --device "NVIDIA H100 80GB HBM3" --out benchmarks/results/nvidia-h100

`--device` names the GPU, which a run directory does not.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from common import environment, say

from nemo_rl_offload.bench.report import write_json
from nemo_rl_offload.config.loader import load_config
from nemo_rl_offload.runs.run_directory import EVALUATION_FILE, METRICS_FILE, SAMPLES_FILE, SUMMARY_FILE

NUM_SAMPLES = 4
"""Of the first validation and of the last, the same problems, spread over those that were kept."""
PROMPT_CHARACTERS = 200
METRICS = ("accuracy", "loss")
"""Of validation, what is drawn: the first that there is."""


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def read_run(run_dir: Path) -> dict[str, Any]:
    """One run's figures; without a summary, of one that was cut off, those of its steps until then."""
    metrics = records(run_dir / METRICS_FILE)
    if (kept := run_dir / SUMMARY_FILE).exists():
        summary = json.loads(kept.read_text(encoding="utf-8"))
    else:
        seed = load_config(run_dir / "config.yaml")["grpo"]["seed"]
        seconds = metrics[-1]["time"] - metrics[0]["time"]
        summary = {"seed": seed, "steps": metrics[-1]["step"], "wall_seconds": seconds, "memory": {}}
    validations = [each for each in metrics if each["prefix"] == "validation"]
    if not validations:
        raise SystemExit(f"{run_dir}: the run was never validated")
    metric = next(name for name in METRICS if name in validations[0]["metrics"])
    steps = [each["metrics"] for each in metrics if each["prefix"] == "train"]
    names = [name for name in steps[0] if name.startswith("timing/")]
    return {
        "name": run_dir.name,
        "seed": summary["seed"],
        "steps": summary["steps"],
        "metric": metric,
        "validation": [[each["step"], each["metrics"][metric]] for each in validations],
        "wall_s": summary["wall_seconds"],
        "medians": {name: statistics.median(step[name] for step in steps) for name in names},
        "memory": summary["memory"],
        "samples": samples(records(run_dir / SAMPLES_FILE)) if (run_dir / SAMPLES_FILE).exists() else [],
    }


def read_evaluation(run_dir: Path) -> dict[str, Any]:
    """Of finished weights, with some of what they answered."""
    found = json.loads((run_dir / EVALUATION_FILE).read_text(encoding="utf-8"))
    shown = records(run_dir / SAMPLES_FILE)
    shown = shown[:: max(1, len(shown) // NUM_SAMPLES)][:NUM_SAMPLES]
    return {
        **{key: found[key] for key in ("num_problems", "accuracy", "standard_error")},
        "samples": [
            {"prompt": each["prompt"][-PROMPT_CHARACTERS:], **{key: each[key] for key in ("response", "reward")}}
            for each in shown
        ],
    }


def samples(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Responses to problems that the first validation and the last have both shown."""
    shown = [each for each in found if each["prefix"] == "validation"]
    first, last = ({each["prompt"]: each for each in shown if each["step"] == step} for step in ends(shown))
    both = [prompt for prompt in first if prompt in last]
    both = both[:: max(1, len(both) // NUM_SAMPLES)][:NUM_SAMPLES]
    return [
        {
            "prompt": prompt[-PROMPT_CHARACTERS:],
            **{
                when: {key: each[prompt][key] for key in ("response", "reward")}
                for when, each in (("before", first), ("after", last))
            },
        }
        for prompt in both
    ]


def ends(shown: list[dict[str, Any]]) -> tuple[int, int]:
    steps = [each["step"] for each in shown]
    return min(steps), max(steps)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN_DIR")
    parser.add_argument(
        "--evaluations", type=Path, nargs="+", default=[], metavar="RUN_DIR", help="of `eval`, afterwards"
    )
    parser.add_argument("--name", required=True, help="of the result's file")
    parser.add_argument("--title", required=True, help="what was trained on what")
    parser.add_argument("--device", required=True)
    parser.add_argument("--samples", action=argparse.BooleanOptionalAction, default=True, help="keep some")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    options = parser.parse_args()
    runs = [read_run(run_dir) for run_dir in options.run_dirs]
    for run, run_dir in zip(runs, options.evaluations, strict=bool(options.evaluations)):
        run["evaluation"] = read_evaluation(run_dir)
    if not options.samples:
        runs = [{**run, "samples": []} for run in runs]
        for found in (run["evaluation"] for run in runs if "evaluation" in run):
            found["samples"] = []
    about = {
        "experiment": "learning",
        "commit": environment()["commit"],
        "device": options.device,
        "title": options.title,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    write_json(options.out / f"{options.name}.json", {**about, "runs": runs})
    for run in runs:
        (_, before), *_, (_, after) = run["validation"]
        say(f"{run['name']}: {before:.3f} before, {after:.3f} after {run['steps']} steps, {run['wall_s']:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
