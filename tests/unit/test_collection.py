"""Every test is found."""

from fnmatch import fnmatch
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


def test_every_folder_of_tests_is_entered(pytestconfig: pytest.Config) -> None:
    """Pytest leaves out folders by name, as `build`."""
    folders = {parent for file in TESTS.rglob("test_*.py") for parent in file.relative_to(TESTS).parents}
    names = {folder.name for folder in folders} - {""}
    patterns = pytestconfig.getini("norecursedirs")
    assert [name for name in sorted(names) if any(fnmatch(name, pattern) for pattern in patterns)] == []
    assert "build" in names
