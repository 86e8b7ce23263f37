"""docs/from-nemo-rl.md is what its tool writes from the table."""

import pytest
from nemo_rl_reference import DOCUMENT, MARK, documents, main

from nemo_rl_offload.config.nemo_rl.table import rows


def test_the_page_is_fresh() -> None:
    assert documents()[DOCUMENT] == DOCUMENT.read_text(encoding="utf-8"), "run: python tools/nemo_rl_reference.py"


def test_a_stale_page_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(check=True) == 0
    assert capsys.readouterr().out == ""


def test_every_key_has_its_line() -> None:
    written = DOCUMENT.read_text(encoding="utf-8").partition(MARK)[2]
    for row in rows().values():
        if not row.path.startswith(("data.validation.", "data.default.")):
            assert f"| `{row.path}{'.*' if row.is_open else ''}` |" in written
