"""A sample of `run_directory_links.py`."""

import random
from pathlib import Path

import pytest
from run_directory_links import attack

pytestmark = pytest.mark.slow


@pytest.mark.sampled
def test_what_links_lead_to_stays_as_it_is(tmp_path: Path) -> None:
    assert attack(tmp_path, 24, random.Random(1)) == (24, [])
