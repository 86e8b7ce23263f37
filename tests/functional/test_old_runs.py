"""Run directories and checkpoints of earlier versions go on: what version 0.1.0 wrote before its modules moved.

`old_runs/sft_0_1_0.tar.gz` holds a model of 29 thousand random weights, the configuration `sft.yaml`, a finished run of
four steps, and the same run as it was after its checkpoint of step 2.
"""

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from example_runs import python_path
from patience import PATIENCE_S

from nemo_rl_offload.config.loader import PROJECT_ROOT

pytestmark = pytest.mark.slow
ARCHIVE = Path(__file__).parent / "old_runs" / "sft_0_1_0.tar.gz"


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("old")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder


def command(old: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "nemo_rl_offload.cli", *arguments],
        capture_output=True,
        text=True,
        cwd=old,
        env={**os.environ, "PYTHONPATH": python_path(PROJECT_ROOT), "OMP_NUM_THREADS": "1"},
        timeout=PATIENCE_S,
        check=False,
    )


def measured(run_dir: Path) -> dict[tuple[int, str], dict[str, Any]]:
    """Metrics by step and prefix, but for times and memory."""
    leaves_out = ("per_s", "timing/", "memory/")
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {
        (each["step"], each["prefix"]): {
            name: value for name, value in each["metrics"].items() if not any(part in name for part in leaves_out)
        }
        for each in records
    }


@pytest.mark.sampled
def test_an_interrupted_run_goes_on(old: Path) -> None:
    done = command(old, "run", "sft", "--config", "sft.yaml", "--run-dir", "interrupted")
    assert done.returncode == 0, done.stderr
    assert "Resuming from interrupted/checkpoints/step_2" in done.stdout
    there, expected = measured(old / "interrupted"), measured(old / "finished")
    assert list(there) == list(expected)
    for key, metrics in expected.items():
        # Another processor's kernels may round otherwise; where it was written, the same bits come out.
        assert there[key] == pytest.approx(metrics, rel=1e-4), key


def test_a_finished_run_is_shown_and_reported(old: Path) -> None:
    done = command(old, "run", "sft", "--config", "sft.yaml", "--run-dir", "finished")
    assert done.returncode == 0, done.stderr
    assert "This run is finished" in done.stdout
    assert command(old, "report", "finished").returncode == 0
    assert "<svg" in (old / "finished" / "report.html").read_text()


def test_a_checkpoint_is_exported(old: Path) -> None:
    from transformers import AutoModelForCausalLM

    done = command(old, "export", "finished/step_4", "exported")
    assert done.returncode == 0, done.stderr
    _, info = AutoModelForCausalLM.from_pretrained(old / "exported", output_loading_info=True)
    assert not any(info.values())
