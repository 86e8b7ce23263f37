"""A tenth of the changed checkpoints, and a whole export of one."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE_S

from nemo_rl_offload.config.loader import PROJECT_ROOT

pytestmark = pytest.mark.slow


@pytest.mark.sampled
def test_a_changed_checkpoint_is_refused_or_is_what_was_saved() -> None:
    attack = Path(__file__).with_name("checkpoint_fuzz.py")
    done = subprocess.run(
        [sys.executable, str(attack), "--cases", "100", "--exports", "1", "--seed", "2"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(PROJECT_ROOT), "OMP_NUM_THREADS": "1"},
        timeout=PATIENCE_S,
        check=False,
    )
    summary = done.stdout.splitlines()[-1]
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = re.search(
        r"checkpoint_fuzz: 100 cases, seed 2: .*export: refused \d, .*refused (\d+), same (\d+)$", summary
    )
    assert found, summary
    assert int(found[1]) > 50
    assert int(found[2]) > 0
