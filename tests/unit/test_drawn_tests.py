"""Which slow tests a run of a share takes (`tests/conftest.py`)."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE_S

from nemo_rl_offload.config.loader import PROJECT_ROOT

MADE = """
import pytest
pytestmark = pytest.mark.slow

@pytest.mark.sampled
@pytest.mark.parametrize("case", range(100))
def test_table(case): ...

@pytest.mark.parametrize("case", range(10))
def test_whole(case): ...

def test_alone(): ...

@pytest.mark.sampled
def test_run(): ...
"""
PLAIN = """
import pytest

@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", range(10))
def test_long(case): ...

def test_always(): ...
"""


def drawn(folder: Path, *options: str) -> list[str]:
    words = [sys.executable, "-m", "pytest", "-c", folder / "pytest.ini", "--collect-only", "-q", *options, folder]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=PATIENCE_S, cwd=folder)
    return re.findall(r"^(test_\w+\.py::\S+)", done.stdout, re.MULTILINE)


@pytest.mark.slow
def test_a_share_takes_some_of_each_and_another_commit_others(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow\n    sampled\n")
    (tmp_path / "conftest.py").write_text((PROJECT_ROOT / "tests/conftest.py").read_text())
    for name in ("test_a", "test_b"):
        (tmp_path / f"{name}.py").write_text(MADE)
    (tmp_path / "test_c.py").write_text(PLAIN)
    assert len(drawn(tmp_path)) == 2 * 112 + 11, "all without a share"
    plain = drawn(tmp_path, "-m", "not slow", "--cases", "0", "--slow", "0")
    assert plain == ["test_c.py::test_long[0]", "test_c.py::test_long[5]", "test_c.py::test_always"]
    share = ("--cases", "0.05", "--slow", "0.3")
    by_seed = [drawn(tmp_path, "-m", "slow", *share, "--cases-seed", seed) for seed in ("one", "two", "one")]
    assert by_seed[0] == by_seed[2] != by_seed[1]
    for names in by_seed:
        for file in ("test_a", "test_b"):
            of_file = [name for name in names if name.startswith(file)]
            counts = [sum(table in name for name in of_file) for table in ("table", "whole", "alone")]
            assert (counts[0], counts[1] + counts[2]) == (5, 4), "of 100, and of 11"
        assert sum("test_long" in name for name in names) == 1, "of 8"
        assert sum("test_run" in name for name in names) == 1, "of both files' together"


@pytest.mark.slow
def test_what_would_begin_too_late_is_skipped_and_said(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow\n    sampled\n")
    (tmp_path / "conftest.py").write_text((PROJECT_ROOT / "tests/conftest.py").read_text())
    for name in "abcdef":
        (tmp_path / f"test_{name}.py").write_text("def test_it(): ...\n")
    words = [sys.executable, "-m", "pytest", "-c", tmp_path / "pytest.ini", "-v", "-rs", tmp_path, "--within"]

    def outcomes(minutes: str, seed: str) -> dict[str, str]:
        """By file, as they came."""
        command = [*words, minutes, "--cases-seed", seed]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S, cwd=tmp_path)
        assert done.returncode == 0, done.stdout
        assert ("the 0 minutes are over" in done.stdout) == (minutes == "0")
        return dict(re.findall(r"^test_(\w)\.py::test_it (\w+)", done.stdout, re.MULTILINE))

    assert set(outcomes("0", "one").values()) == {"SKIPPED"}
    found = [outcomes("60", seed) for seed in ("one", "two", "one")]
    assert [set(each.values()) for each in found] == 3 * [{"PASSED"}]
    assert list(found[0]) == list(found[2]) != list(found[1])
    assert sorted(found[0]) == list("abcdef")
