"""A worker and a driver killed once each; `kill_runs.py` does it more often."""

import random
from pathlib import Path

import pytest
from kill_runs import differences, kill_drivers, kill_workers, whole_run

pytestmark = pytest.mark.slow
NUM_STEPS = 6


@pytest.mark.sampled
def test_killed_runs_end_as_the_whole_run_does(tmp_path: Path) -> None:
    whole_run(tmp_path / "whole", NUM_STEPS)
    for name, kill in (("workers", kill_workers), ("drivers", kill_drivers)):
        (only,) = kill(tmp_path / name, NUM_STEPS, 1, random.Random(name))
        assert only["resumed_from"] >= only["saved"]
        assert differences(tmp_path / name, tmp_path / "whole", NUM_STEPS) == []
