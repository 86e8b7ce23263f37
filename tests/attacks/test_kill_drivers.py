"""Two killed drivers; `kill_drivers.py` kills more of them."""

import pytest
from kill_drivers import attack

pytestmark = pytest.mark.slow


@pytest.mark.sampled
def test_nothing_outlives_a_killed_driver() -> None:
    left, num_folders = attack(num_cases=2, seed=3)
    assert left == []
    assert num_folders == 2
