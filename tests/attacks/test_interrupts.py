"""A sample of the interrupts; `python tests/attacks/interrupts.py --every` has all.

In a process of its own: an interrupt may come in any code that runs, also in hooks that other tests' libraries left.
"""

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
@pytest.mark.parametrize(
    ("model", "cases"),
    [("blocks", 60), ("nested", 40), ("simulated", 80), ("auto", 40), ("megatron", 40), ("transformers", 20)],
)
def test_nothing_is_left_behind_by_an_interrupt(model: str, cases: int) -> None:
    attack = Path(__file__).with_name("interrupts.py")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(attack), "--cases", str(cases), "--models", model, "--seed", "1"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(PROJECT_ROOT), "OMP_NUM_THREADS": "1"},
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    summary = done.stdout.splitlines()[-1]
    assert summary.startswith("0 faults; ")
    counts = {name.strip(): int(number) for name, number in re.findall(r"([a-z ]+) (\d+)", summary.partition("; ")[2])}
    assert counts["interrupted"] > cases // 4, summary
    assert counts.get("signals", 0) + counts.get("storms", 0) > cases // 8, summary
