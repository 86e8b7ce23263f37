"""Records of megabytes take neither minutes nor gigabytes."""

from pathlib import Path

import big_records
import pytest

pytestmark = pytest.mark.slow


@pytest.mark.sampled
def test_huge_records_do_no_harm(tmp_path: Path) -> None:
    assert big_records.attack(["words", "turns"], 8_000_000, tmp_path) == []
