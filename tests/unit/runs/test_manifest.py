"""A checkpoint's own JSON is what its type says, and names plain files of its folder; whatever else is one error."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from patience import within_patience
from run_folders import save, write

from nemo_rl_offload.cli.command_line import main
from nemo_rl_offload.errors import CheckpointError
from nemo_rl_offload.runs.manifest import file_digest, open_inside
from nemo_rl_offload.runs.run_directory import CONFIG_FILE, Checkpoints, loop_state, read_checkpoint
from nemo_rl_offload.specs.documents import RUN_BYTES
from nemo_rl_offload.units import human_bytes

STATE: dict[str, Any] = {
    "data": {"epoch": 1, "position": 7},
    "validation": {"first": 0.5, "last": None},
    "train": {"loss": 1.5, "reward": None},
    "validation_metrics": {},
    "num_skipped": 0,
    "wall_seconds": 2.5,
}
DEEP, LONG = "[" * 100_000, "1" * 5000
SHAPES = [
    *("", "null", "[]", "3", "{", '"text"', "[{}]", "NaN", "\x00", "\u2028", DEEP, '{"a": ' * 50_000, LONG),
    *(f'{{"a": {LONG}}}', "[" * 50 + "]" * 50, '{"a": ' * 50 + "1" + "}" * 50, "x" * 100_000),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return save(Checkpoints(tmp_path / "run", None, True), 5, STATE, 0.5, write)


def refused(folder: Path, message: str = "") -> str:
    with within_patience(), pytest.raises(CheckpointError) as caught:
        loop_state(read_checkpoint(folder))
    text = str(caught.value)
    assert text.startswith(f"{folder} is damaged: ")
    assert text.endswith(f" Remove {folder} to start again.")
    assert len(text) < 1000
    assert len(text.splitlines()) == 1
    assert re.search(message, text), text
    return text


def write_state(folder: Path, text: str) -> None:
    """With a manifest that fits."""
    (folder / "training_info.json").write_text(text)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["training_info.json"] = file_digest(folder / "training_info.json")
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"training_info.json": %(it)s, "training_info.json": %(it)s}', "training_info.json. twice in one object"),
        (b'{"training_info.json": {"bytes": 1, "bytes": 2}}', 'the key "bytes" twice in one object'),
        (b'{"' + b"k" * 5000 + b'": 1, "' + b"k" * 5000 + b'": 1}', 'it has the key "kkk'),
        (b'{"training_info.json": %(it)s, "a": [' + b"0," * 5_000_000 + b"0]}", "it has over 5000000 values"),
        (b'{"training_info.json": %(it)s, "\\ud800": %(it)s}', "manifest.json cannot be read: "),
        (b"\xff", "it is not UTF-8 text"),
        (b"\xef\xbb\xbf{}", "it begins with a byte order mark"),
    ],
    ids=range(7),
)
def test_a_manifest_has_the_limits_of_every_document(text: bytes, message: str, folder: Path) -> None:
    entry = json.loads((folder / "manifest.json").read_text())["training_info.json"]
    (folder / "manifest.json").write_bytes(text.replace(b"%(it)s", json.dumps(entry).encode()))
    refused(folder, message)


@pytest.mark.parametrize("text", SHAPES)
def test_a_manifest_of_another_shape(text: str, folder: Path) -> None:
    (folder / "manifest.json").write_text(text)
    refused(folder, "manifest.json")


@pytest.mark.parametrize("text", [*SHAPES, "{}", '{"step": 5}'])
def test_training_info_of_another_shape(text: str, folder: Path) -> None:
    write_state(folder, text)
    refused(folder, "training_info.json")


@pytest.mark.parametrize(
    ("digest", "message"),
    [
        (None, "valid dictionary|an object"),
        (3, "valid dictionary|an object"),
        ([], "valid dictionary|an object"),
        ({}, "bytes.*required"),
        ({"bytes": 1}, "sha256.*required"),
        ({"bytes": "x", "sha256": "0" * 64}, "valid integer"),
        ({"bytes": -1, "sha256": "0" * 64}, "greater than or equal to 0"),
        ({"bytes": 1.5, "sha256": "0" * 64}, "valid integer"),
        ({"bytes": 1 << 70, "sha256": "0" * 64}, "less than"),
        ({"bytes": 1, "sha256": "0" * 63}, "should match pattern"),
        ({"bytes": 1, "sha256": ["0"]}, "valid string"),
    ],
)
def test_an_entry_of_another_shape(digest: object, message: str, folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "policy/weights": digest}))
    refused(folder, f"manifest.json cannot be read: 'policy/weights.*{message}")


@pytest.mark.parametrize(
    "name",
    [
        *(
            "../precious",
            "/etc/passwd",
            "policy/../../precious",
            "policy/..",
            "..",
            ".",
            "",
            "policy/",
            "/",
            "policy//w",
        ),
        *("policy/a/b", "policy/\0", "policy/a\nb", "policy/" + "a" * 300, "./training_info.json"),
    ],
)
def test_a_manifest_names_files_of_the_folder_alone(name: str, folder: Path, tmp_path: Path) -> None:
    precious = tmp_path / "run" / "checkpoints" / "precious"
    precious.write_text("w")
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, name: file_digest(precious)}))
    refused(folder, "manifest.json")


@pytest.mark.parametrize("name", ["policy/weights", "training_info.json", "manifest.json", "policy"])
@pytest.mark.parametrize(
    ("stand_in", "what"),
    [
        (lambda path, moved: path.symlink_to(moved), "a link"),
        (lambda path, _: path.symlink_to(path), "a link"),
        (lambda path, _: path.symlink_to("/dev/zero"), "a link"),
        (lambda path, _: os.mkfifo(path), "a pipe"),
        (lambda path, _: path.mkdir(), "a folder"),
    ],
)
def test_only_plain_files_are_opened(
    stand_in: Callable[[Path, Path], None], what: str, name: str, folder: Path, tmp_path: Path
) -> None:
    (folder / name).rename(tmp_path / "moved")
    stand_in(folder / name, tmp_path / "moved")
    if (name, what) == ("policy", "a folder"):
        refused(folder, "policy/weights is missing")
    else:
        refused(folder, f"{name}.* cannot be read: it is {what}, and no (plain file|folder)")


def test_a_folder_may_be_reached_by_a_link(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    (tmp_path / "run").symlink_to(tmp_path / "elsewhere")
    assert read_checkpoint(folder).state["step"] == 5


def test_a_name_is_one_of_a_file_inside(tmp_path: Path) -> None:
    (tmp_path / "inside").mkdir()
    (tmp_path / "precious").touch()
    for name in ("../precious", str(tmp_path / "precious"), "", ".", "a/../../precious", "a//b"):
        with pytest.raises(OSError, match=r"names no file inside|No such file"):
            open_inside(tmp_path / "inside", name)


def test_a_folder_and_a_file_in_it_may_have_one_name(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "a").write_text("it")
    with open_inside(tmp_path, "a/a") as file:
        assert file.read() == b"it"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": 6}, "training_info.json is of step 6"),
        ({"step": None}, "step.*valid integer"),
        ({"step": -1}, "step"),
        ({"step": True}, "step.*valid integer"),
        ({"metric": "x"}, "metric.*valid number"),
        ({"metric": []}, "metric.*valid number"),
        ({"data": None}, "data"),
        ({"data": {"epoch": 1}}, "data: .*position is missing"),
        ({"data": {"epoch": -1, "position": 0}}, "data.epoch"),
        ({"validation": []}, "validation"),
        ({"train": {"loss": "x"}}, "train.loss"),
        ({"validation_metrics": None}, "validation_metrics"),
        ({"num_skipped": "many"}, "num_skipped"),
        ({"totals": {}}, "totals.offload"),
        ({"wall_seconds": -1}, "wall_seconds"),
    ],
)
def test_values_of_other_types_in_training_info(change: dict[str, object], message: str, folder: Path) -> None:
    write_state(folder, json.dumps({"step": 5, "metric": 0.5, **STATE, **change}))
    refused(folder, message)


@pytest.mark.parametrize("key", sorted(STATE.keys() - {"wall_seconds"}))
def test_missing_parts_of_training_info(key: str, folder: Path) -> None:
    state = {"step": 5, "metric": None, **STATE}
    del state[key]
    write_state(folder, json.dumps(state))
    refused(folder, f"{key}: Field required")


def test_what_was_no_number_is_none_again(folder: Path) -> None:
    state = loop_state(read_checkpoint(folder))
    assert str(state["train"]["reward"]) == "nan"
    assert state["data"] == STATE["data"]


def test_a_manifest_without_the_state(folder: Path) -> None:
    (folder / "manifest.json").write_text("{}")
    refused(folder, "manifest.json does not name training_info.json")


def test_a_huge_file_is_not_read(folder: Path) -> None:
    with (folder / "manifest.json").open("wb") as file:
        file.truncate(1 << 40)
    refused(folder, f"manifest.json has more than {human_bytes(RUN_BYTES)}")


@pytest.mark.parametrize("text", SHAPES)
def test_an_export_ends_with_one_line(text: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "manifest.json").write_text(text)
    run_dir = folder.parents[1]
    (run_dir / CONFIG_FILE).write_text(yaml.safe_dump({"policy": {}, "data": {}}))
    assert main(["export", str(run_dir / "step_5"), str(run_dir.parent / "out")]) == 2
    error = capsys.readouterr().err
    assert re.fullmatch(rf"error: {folder} is damaged: manifest\.json .*\n", error)
    assert not (run_dir.parent / "out").exists()
