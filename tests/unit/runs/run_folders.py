"""Run directories and checkpoints that are made without training."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from nemo_rl_offload.runs.manifest import file_digest
from nemo_rl_offload.runs.run_directory import Checkpoints, open_run_directory

CONFIG = {"grpo": {"seed": 1, "names": ["a", "b"]}, "lr": 1e-5, "none": None}


def write(folder: Path) -> None:
    folder.mkdir()
    (folder / "weights").write_text("w")


def save(
    checkpoints: Checkpoints, step: int, state: dict[str, Any], metric: float | None, write: Callable[[Path], None]
) -> Path:
    """Begin and commit a checkpoint, of which `write` makes the files."""
    written: list[Path] = []

    def write_and_note(folder: Path) -> None:
        write(folder)
        written.extend(folder.iterdir())

    checkpoints.begin(step, write_and_note)
    return checkpoints.commit(step, state, metric, lambda: {path.name: file_digest(path) for path in written})


def enter(explicit: Path | None, default: Path, config: dict[str, Any]) -> Path:
    with open_run_directory(explicit, default, config) as folder:
        return folder


def train(run_dir: Path, step: int) -> Path:
    """Leave a checkpoint of a step, and a line of metrics."""
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write("{}\n")
    return save(Checkpoints(run_dir, None, True), step, {}, None, write)
