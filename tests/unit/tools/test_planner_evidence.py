"""The figures that others published, and the document that compares them."""

import planner_evidence as evidence
import pytest


def test_published_run_of_deepseek_layers() -> None:
    run = evidence.deepseek_run()
    assert run.layer_bytes == 4096 * (2 * 7168 + 8 * 7168 + 8 * 2 * 2048) * 2
    assert run.saved_bytes / evidence.MIB == pytest.approx(evidence.DEEPSEEK_SAVED_MIB, rel=0.05)
    assert 0 <= run.loss_percent <= 3
    assert 0.8 * run.saved_bytes < run.saved_with_copies_bytes < run.saved_bytes


def test_published_ratio_of_two_stages_with_interleaving() -> None:
    """With n groups in a chunk the ratio is 5 n - 1 to 3 n - 1, which is the published 9 to 5 for n = 2 alone."""
    assert evidence.interleaved_groups() == (9, 5)
    assert 1440 / 9 == 800 / 5


def test_the_document_is_fresh() -> None:
    assert evidence.document() == evidence.DOCUMENT.read_text(encoding="utf-8"), "run python tools/planner_evidence.py"
