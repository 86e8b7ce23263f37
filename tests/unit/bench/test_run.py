"""What a bench says of its options before it measures anything, and of a disk on which it cannot write."""

import re
from pathlib import Path

import pytest
import torch

from nemo_rl_offload.bench.report import write_json
from nemo_rl_offload.cli import main
from nemo_rl_offload.errors import ResourceError


@pytest.mark.parametrize("what", ["offload", "stash"])
@pytest.mark.parametrize(("out", "reason"), [("file", "File exists"), ("file/x", "Not a directory")])
def test_where_nothing_can_be_written_is_said_before_anything_is_measured(
    what: str,
    out: str,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for key in ("CUBLAS_WORKSPACE_CONFIG", "TRANSFORMERS_VERBOSITY"):
        monkeypatch.setenv(key, "error")  # which the bench would set, for good
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for measuring in ("bench.offload.run", "bench.stash.measure_copies"):
        monkeypatch.setattr(f"nemo_rl_offload.{measuring}", lambda *_, **__: pytest.fail("it measures"))
    (tmp_path / "file").touch()
    folder = tmp_path / out
    assert main(["bench", what, "--out", str(folder)]) == 2
    expected = f"error: --out {folder}: cannot write to {folder}: {reason}. Name another folder.\n"
    assert capsys.readouterr().err == expected


def test_a_file_that_cannot_be_written_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "x" / "offload.json"
    with pytest.raises(ResourceError, match=f"Cannot write {re.escape(str(path))}: Not a directory. Free some space"):
        write_json(path, {})


def test_what_stood_there_outlives_a_failure(tmp_path: Path) -> None:
    path = write_json(tmp_path / "figures.json", {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_text() == '{\n "a": 1\n}\n'
