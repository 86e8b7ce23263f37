"""Each attack, and each other script that takes options, can be started as its first lines say."""

import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE_S

from nemo_rl_offload.config.loader import PROJECT_ROOT

FOLDERS = [PROJECT_ROOT / "tests" / name for name in ("attacks", "functional")]
SCRIPTS = [
    path for folder in FOLDERS for path in sorted(folder.glob("[!t]*.py")) if "ArgumentParser" in path.read_text()
]


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_it_says_what_it_takes(script: Path) -> None:
    done = subprocess.run(
        [sys.executable, script, "--help"], capture_output=True, text=True, check=False, timeout=PATIENCE_S, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    assert f"usage: {script.name}" in done.stdout
