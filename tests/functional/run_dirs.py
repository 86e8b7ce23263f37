"""Run directories with a few steps, as a run leaves them, made without training."""

import json
from pathlib import Path


def make_run(folder: Path, num_steps: int = 3, *, lr: float = 1e-5) -> Path:
    """An unfinished run of GRPO."""
    folder.mkdir()
    (folder / "config.yaml").write_text(f"algorithm: grpo\npolicy:\n  lr: {lr}\ngrpo:\n  seed: 1\n")
    (folder / "metrics.jsonl").touch()
    for step in range(num_steps):
        add_step(folder, step + 1)
    (folder / "warnings.log").write_text("step 1: warning: <no> room\n")
    sample = {
        "step": 1,
        "prefix": "validation",
        "prompt": "a long prompt " * 40,
        "response": "x" * 400,
        "reward": 0.5,
        "truncated": False,
        "num_tokens": 4,
        "num_turns": 1,
    }
    (folder / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    trace = [{"seconds": 0.1 * n, "used_bytes": n << 20, "offloaded_bytes": n << 10} for n in range(9)]
    (folder / "memory_trace.json").write_text(json.dumps({"step": 3, "samples": trace}))
    return folder


def add_step(folder: Path, step: int) -> None:
    """Another step of training, and its validation."""
    metrics = {"loss": 1 / step, "reward": 0.1 * step, "timing/train_s": 0.5, "timing/step_s": 1.0, "tokens_per_s": 9.0}
    with (folder / "metrics.jsonl").open("a") as file:
        for prefix, values in (("train", metrics), ("validation", {"accuracy": 0.1 * step})):
            file.write(json.dumps({"step": step, "prefix": prefix, "metrics": values}) + "\n")
