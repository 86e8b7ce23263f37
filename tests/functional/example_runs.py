"""Whole runs of what a user calls, in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

from patience import PATIENCE_S

from nemo_rl_offload.config.loader import PROJECT_ROOT


def python_path(*folders: Path) -> str:
    """PYTHONPATH with these folders in front."""
    return os.pathsep.join(filter(None, (*map(str, folders), os.environ.get("PYTHONPATH"))))


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in the project's folder, with one thread for each process."""
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        cwd=PROJECT_ROOT,
        env={**os.environ, "PYTHONPATH": python_path(PROJECT_ROOT), "OMP_NUM_THREADS": "1"},
        timeout=PATIENCE_S,
        check=False,
    )


def run_example(algorithm: str, run_dir: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    """Run `examples/run_<algorithm>.py`, whose summary is then JSON on standard output."""
    return run_python(f"examples/run_{algorithm}.py", "--format", "json", "--run-dir", str(run_dir), *overrides)
