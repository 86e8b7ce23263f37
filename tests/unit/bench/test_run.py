"""What a bench says of its options before it measures anything, and of a disk on which it cannot write."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl_offload.bench.report import write_json
from nemo_rl_offload.cli.command_line import main
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


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["offload", "--layers", "0"], "--layers 0"),
        (["offload", "--microbatches", "-1", "--rounds", "0"], "--microbatches -1, --rounds 0"),
        (["stash", "--sequence", "0"], "--sequence 0"),
    ],
)
def test_a_number_that_is_too_low_is_named_as_it_was_typed(
    words: list[str], named: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for key in ("CUBLAS_WORKSPACE_CONFIG", "TRANSFORMERS_VERBOSITY"):
        monkeypatch.setenv(key, "error")
    assert main(["bench", *words]) == 2
    assert capsys.readouterr().err == f"error: {named}: give at least 1\n"


@pytest.mark.parametrize("form", ["table", "json"])
def test_progress_is_told_in_lines_where_there_is_no_terminal(
    form: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for key in ("CUBLAS_WORKSPACE_CONFIG", "TRANSFORMERS_VERBOSITY"):
        monkeypatch.setenv(key, "error")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def measure(*_: Any, progress: Callable[[str], None], **__: Any) -> list[Any]:
        progress("round 1 of 1: [none]")
        return []

    monkeypatch.setattr("nemo_rl_offload.bench.offload.run", measure)
    assert main(["bench", "offload", "--format", form]) == 0
    captured = capsys.readouterr()
    assert captured.err == "building the model\nround 1 of 1: [none]\n"
    assert "round" not in captured.out


def test_a_picture_that_cannot_be_written_is_told_and_the_figures_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for key in ("CUBLAS_WORKSPACE_CONFIG", "TRANSFORMERS_VERBOSITY"):
        monkeypatch.setenv(key, "error")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("nemo_rl_offload.bench.offload.run", lambda *_, **__: [])
    words = ["bench", "offload", "--format", "json", "--out", str(tmp_path)]
    assert main(words) == 0
    figures, picture = sorted(tmp_path.iterdir())
    assert f"wrote {figures}\nwrote {picture}\n" in capsys.readouterr().err
    (tmp_path / "victim").write_text("somebody's")
    for path in (figures, picture):
        path.unlink()
        path.symlink_to("victim")
    assert main(words) == 0
    assert f"wrote {figures}\nwrote {picture}\n" in capsys.readouterr().err
    assert not picture.is_symlink()
    picture.unlink()
    picture.mkdir()
    assert main(words) == 0
    captured = capsys.readouterr()
    assert json.loads(figures.read_text())["device"] == json.loads(captured.out)["device"]
    assert f"wrote {figures}\nwarning: Cannot write {picture}: Is a directory." in captured.err
    assert (tmp_path / "victim").read_text() == "somebody's"


def test_a_file_that_cannot_be_written_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "x" / "offload.json"
    with pytest.raises(ResourceError, match=f"Cannot write {re.escape(str(path))}: Not a directory. Name another"):
        write_json(path, {})


def test_what_stood_there_outlives_a_failure(tmp_path: Path) -> None:
    path = write_json(tmp_path / "figures.json", {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_text() == '{\n "a": 1\n}\n'
