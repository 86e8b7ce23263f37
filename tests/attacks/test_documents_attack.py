"""A sample of all files in all shapes; the whole by hand."""

from pathlib import Path
from random import Random

import documents
import pytest

pytestmark = pytest.mark.slow


def test_no_document_does_harm(tmp_path: Path) -> None:
    chosen = Random(0).sample(documents.cases(), 130)
    assert documents.attack(chosen, tmp_path) == []
