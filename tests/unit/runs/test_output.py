"""Files that commands write: whole or not at all, and said beforehand where they cannot be."""

import errno
import json
import math
import os
import re
from datetime import date
from pathlib import Path

import pytest

from nemo_rl_offload.errors import ConfigError, ResourceError
from nemo_rl_offload.runs.output import check_writable, without_nan, write_text


def test_what_stood_there_outlives_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "page.html"
    write_text(path, "old \ud800")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(ResourceError, match=f"Cannot write {re.escape(str(path))}: No space left on device"):
        write_text(path, "new" * 10000)
    assert path.read_text() == "old \\ud800"
    assert list(tmp_path.iterdir()) == [path]


def test_links_and_pipes_stay_what_they_are(tmp_path: Path) -> None:
    target, link, pipe = (tmp_path / name for name in ("target", "link", "pipe"))
    link.symlink_to(target)
    write_text(link, "text")
    assert link.is_symlink()
    assert target.read_text() == "text"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    check_writable(pipe, "--out")
    write_text(pipe, "text")
    assert os.read(reader, 10) == b"text"
    os.close(reader)


@pytest.mark.parametrize(
    ("name", "reason"),
    [("file/x", "Not a directory"), ("nowhere/x", "No such file or directory"), ("", "Is a directory")],
)
def test_what_cannot_be_written_is_found_out_before(name: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError) as caught:
        check_writable(tmp_path / name, "--html x")
    assert str(caught.value) == f"--html x: cannot be written: {reason}. Name another file."
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_file_that_can_be_written_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    check_writable(tmp_path / "file", "--html file")
    check_writable(tmp_path / "other", "--html other")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "old")]


def test_what_json_has_no_word_for_is_written_all_the_same() -> None:
    data = {"a": [{date(2000, 1, 1): math.inf, 1: 2.0, None: (math.nan, "b")}]}
    written = json.dumps(without_nan(data), allow_nan=False)
    assert json.loads(written) == {"a": [{"2000-01-01": None, "1": 2.0, "null": [None, "b"]}]}
