"""One case of `sigterm_in_saves.py`: the run has too little time for its checkpoint."""

import random
from pathlib import Path

import pytest
from sigterm_in_saves import end_runs_in_saves

pytestmark = pytest.mark.slow


@pytest.mark.sampled
def test_an_asynchronous_save_is_whole_or_absent(tmp_path: Path) -> None:
    assert end_runs_in_saves(tmp_path / "run", 1, random.Random(0)) == []
