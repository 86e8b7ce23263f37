"""Run directories that somebody else has filled, and those that vanish under a run."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from run_folders import CONFIG, enter, save, write

from nemo_rl_offload.errors import CheckpointError, ConfigError, ResourceError
from nemo_rl_offload.runs.output import OptionalLog, RunFolder, RunFolderGoneError
from nemo_rl_offload.runs.run_directory import (
    APPENDED_TO,
    FOLDERS,
    WRITTEN_WHOLE,
    Checkpoints,
    length_on_resume,
    read_checkpoint,
)

FILES = (*WRITTEN_WHOLE, *APPENDED_TO)
CHECKPOINT_FOLDERS = ("checkpoints/step_1", "checkpoints/.step_3.partial")


pytestmark = pytest.mark.usefixtures("never_waits")


@pytest.fixture
def victims(tmp_path: Path) -> Path:
    folder = tmp_path / "victims"
    (folder / "step_1").mkdir(parents=True)
    (folder / "file").write_text("somebody's")
    return folder


def content(folder: Path) -> dict[str, str]:
    return {str(path): path.read_text() if path.is_file() else "" for path in sorted(folder.rglob("*"))}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, kind) for name in (*FILES, *FOLDERS, *CHECKPOINT_FOLDERS) for kind in ("link", "pipe")),
        *((name, "link to nowhere") for name in ("config.yaml", ".lock", "checkpoints", "checkpoints/step_1")),
        *((name, "hard link") for name in APPENDED_TO),  # what is replaced is not written to
    ],
)
def test_strange_things_where_a_run_writes_are_refused_by_name(
    name: str, kind: str, tmp_path: Path, victims: Path
) -> None:
    before = content(victims)
    run_dir = tmp_path / "run"
    path = run_dir / name
    path.parent.mkdir(parents=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "hard link":
        path.hardlink_to(victims / "file")
    else:
        target = "nothing" if kind == "link to nowhere" else "file" if name in FILES else "."
        path.symlink_to(victims / target, target_is_directory=name not in FILES)
    there = sorted(os.listdir(run_dir))
    length_on_resume(run_dir, CONFIG)  # what the command asks before
    with pytest.raises(ConfigError) as caught:
        enter(run_dir, run_dir, CONFIG)
    assert str(caught.value).startswith(f"--run-dir {run_dir}: {name} cannot be used: it is a ")
    assert "\n" not in str(caught.value)
    assert content(victims) == before
    assert sorted(os.listdir(run_dir)) == there
    assert enter(None, run_dir, CONFIG) == tmp_path / "run-2", "where no folder was asked for"


@pytest.mark.parametrize("name", WRITTEN_WHOLE)
def test_a_folder_where_a_file_is_first_written_is_refused_by_name(name: str, tmp_path: Path) -> None:
    run_dir = enter(tmp_path / "run", tmp_path, CONFIG)
    (run_dir / f".{name}.part").mkdir()
    with pytest.raises(ConfigError, match=rf"run: \.{name}\.part cannot be used: it is a folder, and no plain file"):
        enter(run_dir, tmp_path, CONFIG)
    (run_dir / f".{name}.part").rmdir()
    (run_dir / f".{name}.part").symlink_to("nothing")
    assert enter(run_dir, tmp_path, CONFIG) == run_dir


@pytest.mark.parametrize("text", [None, "", "null", "[]", "{}", "algorithm: sft"])
def test_a_run_with_checkpoints_and_without_its_configuration_is_refused(text: str | None, tmp_path: Path) -> None:
    config = {"algorithm": "sft", "sft": {"max_num_steps": 3, "max_num_epochs": 2}}
    run_dir = enter(tmp_path / "run", tmp_path, config)
    save(Checkpoints(run_dir, None, True), 1, {}, None, write)
    (run_dir / "config.yaml").unlink()
    if text is not None:
        (run_dir / "config.yaml").write_text(text)
    length_on_resume(run_dir, config)
    with pytest.raises(ConfigError, match=r"config.yaml|of another configuration"):
        enter(run_dir, tmp_path, config)


def test_what_a_user_puts_there_besides_is_the_user_s(tmp_path: Path, victims: Path) -> None:
    run_dir = enter(tmp_path / "run", tmp_path, CONFIG)
    (run_dir / "best").symlink_to("checkpoints/step_1")
    (run_dir / "notes").hardlink_to(victims / "file")
    (tmp_path / "link").symlink_to(run_dir)
    assert enter(tmp_path / "link", tmp_path, CONFIG) == tmp_path / "link"


@pytest.mark.parametrize("name", ["manifest.json", "training_info.json"])
def test_a_checkpoint_s_own_files_are_not_waited_for(name: str, tmp_path: Path) -> None:
    folder = save(Checkpoints(tmp_path, None, True), 1, {}, None, write)
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(CheckpointError, match=r"is damaged: .*Remove .*step_1 to start again"):
        read_checkpoint(folder)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "a folder": lambda file: (file.unlink(), file.mkdir()),
    "a link": lambda file: (file.rename(file.with_name("other")), file.symlink_to("other")),
    "a pipe": lambda file: (file.unlink(), os.mkfifo(file)),
    "empty": lambda file: file.write_text(""),
    "cut": lambda file: file.write_text(file.read_text()[:20]),
    "null": lambda file: file.write_text("null"),
    "a list": lambda file: file.write_text("[]"),
    "another object": lambda file: file.write_text("{}"),
    "deep": lambda file: file.write_text('{"metric": ' + "[" * 100_000),
    "a long number": lambda file: file.write_text('{"metric": ' + "9" * 5000 + "}"),
    "not a number": lambda file: file.write_text('{"metric": NaN}'),
    "infinite": lambda file: file.write_text('{"metric": -Infinity}'),
    "text": lambda file: file.write_text('{"metric": "0.5"}'),
    "true": lambda file: file.write_text('{"metric": true}'),
    "bytes": lambda file: file.write_bytes(b"\xff\xfe"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_pruning_passes_over_a_damaged_older_checkpoint(damage: str, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, 1, True)
    damaged = save(checkpoints, 1, {}, 9.0, write)
    DAMAGE[damage](damaged / "training_info.json")
    told = []
    for step in (2, 3, 4):
        save(checkpoints, step, {}, -float(step), write)
        told += checkpoints.notices()
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"step_1", "step_2", "step_4"}
    (text,) = told
    assert text.startswith(f"{damaged} is kept: training_info.json cannot be read: ")
    assert "\n" not in text
    state = Checkpoints(tmp_path, 1, True).latest()
    assert state is not None
    assert state.state["step"] == 4


def test_pruning_without_the_right_to_read_or_remove(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests may run as root, who may do everything."""
    checkpoints = Checkpoints(tmp_path, 1, True)
    for step in (1, 2):
        save(checkpoints, step, {}, float(step), write)

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(
            Path, "rename", lambda self, target: refuse() if self.name == "step_2" else os.rename(self, target)
        )
        save(checkpoints, 3, {}, 3.0, write)
        save(checkpoints, 4, {}, 4.0, write)
    assert [text.split(" is kept: ")[1] for text in checkpoints.notices()] == [
        "it cannot be removed: Permission denied. Remove it if it is not needed."
    ]
    save(checkpoints, 5, {}, 5.0, write)
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"step_5"}


def test_a_checkpoint_that_vanishes_while_pruning_is_not_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path, 1, True)
    save(checkpoints, 1, {}, 1.0, write)
    monkeypatch.setattr(checkpoints, "_steps", lambda: [0, 1, 2])
    save(checkpoints, 2, {}, 2.0, write)
    assert checkpoints.notices() == []
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"step_2"}


@pytest.mark.parametrize("how", ["moved", "replaced", "made anew", "a file"])
def test_a_run_directory_that_is_gone_is_noticed(how: str, tmp_path: Path) -> None:
    run_dir = enter(tmp_path / "run", tmp_path, CONFIG)
    folder, checkpoints = RunFolder(run_dir), Checkpoints(run_dir, None, True)
    folder.check()
    if how == "made anew":
        shutil.rmtree(run_dir)
    else:
        run_dir.rename(tmp_path / "elsewhere")
    if how in ("replaced", "made anew"):
        run_dir.mkdir()
    if how == "a file":
        run_dir.write_text("")
    with pytest.raises(RunFolderGoneError, match="was removed, moved or replaced while the run was at work"):
        folder.check()
    if how not in ("replaced", "made anew"):
        with pytest.raises(ResourceError, match="Cannot write"):
            save(checkpoints, 1, {}, None, write)
    assert how != "moved" or not run_dir.exists()


def test_what_a_kill_cut_off_of_a_log_stays_a_line_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "samples.jsonl").write_text('{"step": 1')
    assert OptionalLog(tmp_path / "samples.jsonl").append("new\n") == []
    assert (tmp_path / "samples.jsonl").read_text() == '{"step": 1\nnew\n'


def test_what_a_log_cannot_take_is_told_once(tmp_path: Path) -> None:
    log = OptionalLog(tmp_path / "warnings.log")
    assert log.append("a \ud800\n") == []
    (tmp_path / "warnings.log").rename(tmp_path / "kept")
    (tmp_path / "warnings.log").symlink_to("kept")
    expected = (
        f"{tmp_path}/warnings.log: cannot be written: it is a link, and no plain file. The run goes on without it."
    )
    assert [log.append("b\n"), log.append("c\n")] == [[expected], []]
    (tmp_path / "warnings.log").unlink()
    assert log.append("d\n") == []
    assert (tmp_path / "warnings.log").read_text() == "d\n"
    assert (tmp_path / "kept").read_text() == "a \\ud800\n"
