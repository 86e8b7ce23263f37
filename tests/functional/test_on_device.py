"""The suite's run on GPUs, as far as a machine without one can show it."""

import json
from pathlib import Path

import pytest
from example_runs import run_python

pytestmark = pytest.mark.slow


def test_every_mode_runs_a_file_and_counts(tmp_path: Path) -> None:
    done = run_python("tests/on_device.py", "--out", str(tmp_path), "unit/test_errors.py")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "suite.json").read_text())
    assert sorted(each["mode"] for each in found) == ["default", "expandable segments", "no caching"]
    assert all(each["ended"] == "ok" and each["counts"].keys() == {"passed"} for each in found)
    assert [path.name for path in tmp_path.iterdir()] == ["suite.json"], "logs are kept of what failed"


def test_a_file_that_is_cut_says_so_and_keeps_its_output(tmp_path: Path) -> None:
    done = run_python("tests/on_device.py", "--out", str(tmp_path), "--limit-s", "0", "unit/test_errors.py")
    assert done.returncode == 1, done.stderr
    assert {each["ended"] for each in json.loads((tmp_path / "suite.json").read_text())} == {"cut"}
    assert len(list(tmp_path.glob("*.log"))) == 3
    assert "cut: tests/unit/test_errors.py (default)" in done.stdout
