"""One run whose Ray is killed twice; `kill_ray.py` does it with more."""

import pytest
from kill_ray import attack

pytestmark = pytest.mark.slow


def test_ray_that_is_killed() -> None:
    assert attack(num_cases=1, seed=0) == []
