"""What a page says that `plan` prints is what it prints."""

import re
import shlex

import pytest

from nemo_rl_offload.cli import main
from nemo_rl_offload.config.loader import PROJECT_ROOT


@pytest.mark.slow
def test_the_plan_for_many_nodes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    page = (PROJECT_ROOT / "docs/results.md").read_text(encoding="utf-8").partition("## Sixty-four nodes")[2]
    command = re.search(r"^nemo-rl-offload (plan .*)$", page, re.MULTILINE)
    assert command
    monkeypatch.chdir(PROJECT_ROOT)
    assert main(shlex.split(command[1])) == 0
    printed = capsys.readouterr().out
    found = re.findall(
        r"^\d\. (.*), \d+ microbatches.*peak (.*), step (.*), messages (.*), host (.*) per node", printed, re.MULTILINE
    )
    rows = re.findall(r"^\| (TP.*) \| (.*) \| (.*) \| (.*) \| (.*) \|$", page, re.MULTILINE)
    assert rows == found
    assert len(rows) == 3
