"""One run whose Ray is killed twice, and one start; `kill_ray.py` does it with more."""

from pathlib import Path

import pytest
from kill_ray import attack, faults_of_start

pytestmark = pytest.mark.slow


@pytest.mark.sampled
def test_ray_that_is_killed() -> None:
    assert attack(num_cases=1, num_starts=0, seed=0) == []


@pytest.mark.sampled
def test_a_process_of_ray_that_ends_while_ray_starts(tmp_path: Path) -> None:
    assert faults_of_start(tmp_path / "run", "gcs_server", after_s=0.5) == []
