"""Files are told from others by what is in them."""

import json
import os
from pathlib import Path

import pytest

from nemo_rl_offload.runs import inputs
from nemo_rl_offload.runs.inputs import FileMark, changes, mark_of, read_inputs, told, write_inputs


def marked(path: Path, *, keeps_content: bool = False) -> dict[str, FileMark]:
    mark = mark_of(path, keeps_content=keeps_content)
    return {} if mark is None else {path.name: mark}


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        (b"one\ntwo\n", None),
        (b"one\ntwo\nthree\n", "has 6 bytes more at its end"),
        (b"zero\none\ntwo\n", "has other content (8 bytes then, 13 now)"),
        (b"one\nTWO\n", "has other content (8 bytes)"),
        (b"one\n", "has other content (8 bytes then, 4 now)"),
        (b"", "has other content (8 bytes then, 0 now)"),
        (None, "is gone"),
    ],
)
def test_what_happened_to_a_file(after: bytes | None, expected: str | None, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b"one\ntwo\n")
    before = marked(path)
    path.unlink()
    if after is not None:
        path.write_bytes(after)
        os.utime(path, (1, 1))
    assert changes(before, marked(path), path) == ({} if expected is None else {"data.jsonl": expected})


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        ('{"rope": {"theta": 1.0, "type": "yarn"}, "eps": 1e-6}', ""),  # other layout
        ('{"eps": 1e-6, "rope": {"type": "yarn", "theta": 2.0}}', "rope.theta was 1.0, is 2.0"),
        ('{"eps": 1e-6, "rope": {"theta": 1.0}}', 'rope.type was "yarn", is absent'),
        ('{"eps": 1e-6, "rope": null, "new": false}', 'rope was {"theta": 1.0, "type": "yarn"}, is null; new was'),
        ("[1]", None),
    ],
)
def test_keys_of_a_configuration_are_named(after: str, expected: str | None, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"eps": 1e-6, "rope": {"theta": 1.0, "type": "yarn"}}')
    before = marked(path, keeps_content=True)
    path.write_text(after)
    found = changes(before, marked(path, keeps_content=True), tmp_path)
    if expected is None:
        assert found["config.json"].startswith("has other content (")
    elif expected:
        assert found["config.json"].startswith(f"says other things: {expected}")
    else:
        assert found == {}


def test_of_many_changes_a_few_are_shown(tmp_path: Path) -> None:
    there = {f"{number}.jsonl": FileMark(bytes=1, sha256="a") for number in range(5)}
    found = changes(there, {"new.jsonl": FileMark(bytes=1, sha256="b")}, tmp_path)
    paths = [f"{tmp_path}/{number}.jsonl is gone" for number in range(3)]
    assert told(tmp_path, found) == f"{', '.join(paths)}, and 3 more"


@pytest.mark.parametrize("place", [0, 300, 999])
def test_a_large_file_is_told_by_blocks_from_all_over_it(
    place: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "WHOLE_BYTES", 500)
    monkeypatch.setattr(inputs, "BLOCK_BYTES", 8)
    path = tmp_path / "model.safetensors"
    content = bytearray(os.urandom(1000))
    path.write_bytes(content)
    whole, sampled = mark_of(path), mark_of(path, samples=True)
    assert whole is not None
    assert sampled is not None
    assert sampled["sha256"] != whole["sha256"]
    os.utime(path, (1, 1))
    assert mark_of(path, samples=True) == sampled
    content[place] ^= 1
    if place == 300:
        content = bytearray(os.urandom(1000))  # as another step of training would leave it
    path.write_bytes(content)
    assert mark_of(path, samples=True) != sampled


@pytest.mark.usefixtures("never_waits")
@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_what_may_never_end_has_no_mark(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    {"pipe": os.mkfifo, "device": lambda path: path.symlink_to("/dev/zero"), "folder": Path.mkdir}[kind](path)
    assert mark_of(path) is None
    then, now = FileMark(bytes=1, sha256="x"), FileMark(bytes=2, sha256="y")
    assert changes({"a.json": then}, {"a.json": now}, tmp_path) == {"a.json": "has other content (1 bytes then, 2 now)"}
    monkeypatch.setattr(inputs, "WHOLE_BYTES", -1)
    assert mark_of(path, samples=True) is None


def test_a_record_is_read_as_it_was_written_or_not_at_all(tmp_path: Path) -> None:
    assert read_inputs(tmp_path) is None
    record = {"data.train.path": {"a": FileMark(bytes=1, sha256="x", content={"k": [1, None]})}}
    write_inputs(tmp_path, record)
    assert read_inputs(tmp_path) == record
    (tmp_path / "inputs.json").write_text(json.dumps({"data.train.path": {"a": {"bytes": "many"}}}))
    assert read_inputs(tmp_path) is None
