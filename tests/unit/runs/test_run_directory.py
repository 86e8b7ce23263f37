"""Checkpoints are whole or absent, and a run directory is entered only by whom it belongs to."""

import copy
import functools
import hashlib
import json
import operator
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from run_folders import CONFIG, enter, save, train, write

from nemo_rl_offload.config.loader import PROJECT_ROOT, load_config
from nemo_rl_offload.errors import CheckpointError, ConfigError, ResourceError
from nemo_rl_offload.runs.comparison import DECIDED_ANEW, MEANS, OF_THE_ALGORITHM, may_change
from nemo_rl_offload.runs.manifest import check_contents
from nemo_rl_offload.runs.run_directory import (
    Checkpoints,
    changed_on_resume,
    check_no_run_in,
    open_run_directory,
    read_checkpoint,
)
from nemo_rl_offload.runs.run_files import read_changes

OTHER = {**CONFIG, "lr": 2e-5}
SAVES_FOREVER = """
import sys
from itertools import count
from pathlib import Path
from nemo_rl_offload.runs.manifest import file_digest
from nemo_rl_offload.runs.run_directory import Checkpoints

def write(folder):
    folder.mkdir()
    for part in range(50):
        (folder / str(part)).write_text("x" * 1000)

run_dir = Path(sys.argv[1])
checkpoints = Checkpoints(run_dir, 2, True)
for step in count(1):
    folder = run_dir / "checkpoints" / f".step_{step}.partial" / "policy"
    checkpoints.begin(step, write)
    checkpoints.commit(step, {}, step % 3, lambda: {path.name: file_digest(path) for path in folder.iterdir()})
    print(step, flush=True)
"""


def names(run_dir: Path) -> set[str]:
    return {path.name for path in (run_dir / "checkpoints").iterdir()}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_saved_checkpoint_is_whole(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, None, True)
    assert checkpoints.latest() is None
    state = {"prompts": {"epoch": 0, "position": 7}, "validation": {"first": 0.25, "last": None}}
    assert save(checkpoints, 9, state, 0.5, write) == tmp_path / "checkpoints" / "step_9"
    assert save(checkpoints, 10, state, None, write) == tmp_path / "checkpoints" / "step_10"
    folder, loaded, files = Checkpoints(tmp_path, None, True).latest() or pytest.fail("none")
    assert folder.name == "step_10"
    assert loaded == {"step": 10, "metric": None, **state}
    assert (folder / "policy" / "weights").read_text() == "w"
    assert files == {"weights": {"bytes": 1, "sha256": hashlib.sha256(b"w").hexdigest()}}


@pytest.mark.parametrize("error", [ValueError("bug"), KeyboardInterrupt(), OSError(28, "No space left on device")])
@pytest.mark.parametrize("when", ["at once", "half-way"])
def test_a_failed_checkpoint_is_absent(error: BaseException, when: str, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, 1, True)
    save(checkpoints, 1, {}, 1.0, write)

    def fail(folder: Path) -> None:
        if when == "half-way":
            write(folder)
        raise error

    with pytest.raises(ResourceError if isinstance(error, OSError) else type(error)) as caught:
        save(checkpoints, 2, {}, 2.0, fail)
    assert names(tmp_path) == {"step_1"}
    if isinstance(error, OSError):
        assert str(caught.value).startswith(f"Cannot write {tmp_path}/checkpoints/step_2: No space left on device.")


@pytest.mark.slow
def test_a_killed_process_leaves_only_whole_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(0)
    monkeypatch.setenv("PYTHONPATH", str(PROJECT_ROOT), prepend=os.pathsep)
    for round_ in range(4):
        run_dir = tmp_path / str(round_)
        run_dir.mkdir()
        process = subprocess.Popen(
            [sys.executable, "-c", SAVES_FOREVER, str(run_dir)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        last_reported = int(process.stdout.readline())
        time.sleep(rng.uniform(0, 0.15))
        process.send_signal(signal.SIGKILL)
        last_reported = max(last_reported, *map(int, process.stdout.read().split()), 0)
        process.stdout.close()
        process.wait()
        _, state, _ = Checkpoints(run_dir, 2, True).latest() or pytest.fail("none")
        assert state["step"] >= last_reported
        for name in names(run_dir):
            assert name.startswith("step_")
            whole = run_dir / "checkpoints" / name
            assert sum(file.stat().st_size for file in (whole / "policy").iterdir()) == 50_000
            assert json.loads((whole / "training_info.json").read_text())["step"] == int(name.removeprefix("step_"))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    metrics=st.lists(st.none() | st.integers(-2, 2).map(float), min_size=1, max_size=7),
    keep=st.none() | st.integers(1, 3),
    higher=st.booleans(),
)
def test_pruning(metrics: list[float | None], keep: int | None, higher: bool, tmp_path_factory: Any) -> None:
    run_dir = tmp_path_factory.mktemp("run")
    checkpoints = Checkpoints(run_dir, keep, higher)
    kept: list[tuple[int, float | None]] = []
    for step, metric in enumerate(metrics, start=1):
        save(checkpoints, step, {}, metric, write)
        kept.append((step, metric))
        if keep is not None:
            # Worst first: without a metric, then the lower, then the older.
            worst_first = sorted(
                kept, key=lambda item: (item[1] is not None, (item[1] or 0) * (1 if higher else -1), item[0])
            )
            kept = [item for item in kept if item in worst_first[-keep:] or item[0] == step]
        assert names(run_dir) == {f"step_{kept_step}" for kept_step, _ in kept}
    assert checkpoints.latest() is not None


def test_leftovers_are_removed_and_strangers_ignored(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    (folder / ".step_3.partial" / "policy").mkdir(parents=True)
    (folder / "step_2.bak").mkdir()
    (folder / "notes").write_text("mine")
    checkpoints = Checkpoints(tmp_path, 1, True)
    assert names(tmp_path) == {"step_2.bak", "notes"}
    assert checkpoints.latest() is None
    save(checkpoints, 3, {}, None, write)
    assert names(tmp_path) == {"step_2.bak", "notes", "step_3"}


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("training_info.json", None, "training_info.json is missing"),
        ("training_info.json", b"", "training_info.json has 0 bytes instead of"),
        ("manifest.json", None, "manifest.json cannot be read"),
        ("manifest.json", b"{", "manifest.json cannot be read"),
        ("policy/weights", None, "policy/weights is missing"),
        ("policy/weights", b"ww", "policy/weights has 2 bytes instead of 1"),
    ],
)
def test_a_damaged_checkpoint_says_what_to_do(file: str, content: bytes | None, message: str, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, None, True)
    for step in (2, 4):
        folder = save(checkpoints, step, {}, None, write)
    damaged = folder / file
    damaged.unlink() if content is None else damaged.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{folder} is damaged: {message}.* Remove {folder} to go on from step 2"):
        checkpoints.latest()
    shutil.rmtree(folder)
    older, _, _ = checkpoints.latest() or pytest.fail("none")
    assert older.name == "step_2"
    (older / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=f"Remove {older} to start again"):
        checkpoints.latest()


def test_a_damaged_copy_of_a_checkpoint_is_not_to_be_removed_for_a_run(tmp_path: Path) -> None:
    folder = save(Checkpoints(tmp_path, None, True), 5, {}, None, write)
    copied = shutil.copytree(folder, folder.with_name("step_5_old"))
    (copied / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=f"{copied} is damaged: .* It is a copy, .*: choose another checkpoint"):
        read_checkpoint(copied)


def test_contents_are_told_from_others_of_the_same_size(tmp_path: Path) -> None:
    folder = save(Checkpoints(tmp_path, 1, True), 4, {}, None, write)
    (folder / "policy" / "weights").write_text("v")
    _, _, files = Checkpoints(tmp_path, 1, True).latest() or pytest.fail("none")
    check_contents(folder / "policy", files, [])
    with pytest.raises(CheckpointError, match="the content of weights is not what was written"):
        check_contents(folder / "policy", files, ["weights"])
    state = (folder / "training_info.json").read_text()
    (folder / "training_info.json").write_text(state.replace("4", "5"))
    with pytest.raises(CheckpointError, match=r"the content of training_info\.json is not what was written"):
        Checkpoints(tmp_path, 1, True).latest()


def test_full_disk(small_disk: Path) -> None:
    checkpoints = Checkpoints(small_disk, None, True)
    save(checkpoints, 1, {}, None, write)

    def fill(folder: Path) -> None:
        folder.mkdir()
        (folder / "weights").write_bytes(bytes(1 << 20))

    with pytest.raises(ResourceError, match="step_2: No space left on device"):
        save(checkpoints, 2, {}, None, fill)
    assert names(small_disk) == {"step_1"}
    (small_disk / "rest").touch()
    with pytest.raises(OSError, match="No space left"):
        (small_disk / "rest").write_bytes(bytes(1 << 20))
    with pytest.raises(ResourceError, match="No space left on device"):
        enter(small_disk / "new", small_disk, {"text": "x" * 10_000})
    assert not (small_disk / "new" / "config.yaml").exists()
    (small_disk / "rest").unlink()
    assert enter(small_disk / "new", small_disk, CONFIG) == small_disk / "new"


def test_no_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() != 0:
        locked = tmp_path / "locked"
        locked.mkdir(mode=0)
        with pytest.raises(ResourceError, match="Permission denied"):
            enter(locked / "run", tmp_path, CONFIG)
        return
    # Root may do everything; another user may not look into a folder of mode 700.
    script = (
        "import os, sys; from pathlib import Path; import nemo_rl_offload.runs.run_directory as r; "
        "os.setuid(65534); c = r.open_run_directory(Path(sys.argv[1]), Path('x'), {}); c.__enter__()"
    )
    (tmp_path / "locked").mkdir(mode=0o700)
    monkeypatch.setenv("PYTHONPATH", str(PROJECT_ROOT), prepend=os.pathsep)
    for target in ("locked", "locked/run"):
        command = [sys.executable, "-c", script, str(tmp_path / target)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert f"ResourceError: Cannot write {tmp_path / target}: Permission denied" in done.stderr


@pytest.mark.parametrize("explicit", [True, False])
def test_an_unfinished_run_is_taken_up_again(explicit: bool, tmp_path: Path) -> None:
    folder = tmp_path / "results" / "run"
    given_folder = folder if explicit else None
    assert enter(given_folder, folder, CONFIG) == folder
    (folder / "metrics.jsonl").write_text("kept")
    assert enter(given_folder, folder, CONFIG) == folder
    assert (folder / "metrics.jsonl").read_text() == "kept"


def test_a_finished_run_keeps_its_configuration(tmp_path: Path) -> None:
    config = {**CONFIG, "cluster": {"num_nodes": 1}}
    folder = enter(tmp_path / "run", tmp_path, config)
    assert changed_on_resume(folder, config) == {}
    (folder / "summary.json").touch()
    other = {**CONFIG, "cluster": {"num_nodes": 2}}
    assert enter(folder, tmp_path, other) == folder
    assert changed_on_resume(folder, other).told == "cluster.num_nodes is 1 there, 2 here"


def test_default_folder_is_numbered(tmp_path: Path) -> None:
    default = tmp_path / "run"
    for number, name in enumerate(["run", "run-2", "run-3"]):
        folder = enter(None, default, CONFIG)
        assert folder.name == name
        (folder / "summary.json").write_text(str(number))
    (tmp_path / "run-4").write_text("a file")
    assert enter(None, default, OTHER).name == "run-5"
    (tmp_path / "run-5" / "metrics.jsonl").touch()
    assert enter(None, default, CONFIG).name == "run-6"
    assert enter(None, default, OTHER).name == "run-5"


def test_a_new_folder_is_told_where_other_values_are_the_reason(tmp_path: Path) -> None:
    def told_of(config: dict[str, Any]) -> list[str]:
        told: list[str] = []
        with open_run_directory(None, tmp_path / "run", config, told=told.append) as folder:
            (folder / "metrics.jsonl").touch()
        return told

    assert told_of(CONFIG) == []
    (line,) = told_of({**CONFIG, "lr": 2e-5})
    there = f"{tmp_path / 'run'} holds a run of another configuration (lr is 1e-05 there, 2e-05 here)"
    ways = f"With --run-dir {tmp_path / 'run'}, it goes on there with those that may change."
    assert line == f"New run directory: {there}. Without these changes, the command is that run's. {ways}"
    assert told_of({**CONFIG, "lr": 2e-5}) == [], "it goes on"
    for name in ("run", "run-2"):
        (tmp_path / name / "summary.json").touch()
    ways = f"With --run-dir {tmp_path / 'run-2'}, the command shows it, or makes it longer."
    assert told_of(CONFIG) == [f"New run directory: {tmp_path / 'run-2'} holds a finished run. {ways}"]


def test_a_default_folder_without_a_name_is_numbered_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.txt").touch()
    monkeypatch.chdir(tmp_path / "run")
    assert enter(None, Path(), CONFIG) == tmp_path / "run-2"


@pytest.mark.parametrize("name", ["metrics.jsonl", "summary.json", "checkpoints"])
def test_an_evaluation_takes_no_folder_of_a_run(tmp_path: Path, name: str) -> None:
    check_no_run_in(tmp_path / "none")
    for own in ("evaluation.json", "samples.jsonl", "config.yaml"):
        (tmp_path / own).touch()
    check_no_run_in(tmp_path)
    (tmp_path / name).touch()
    with pytest.raises(ConfigError, match="holds a run that trains"):
        check_no_run_in(tmp_path)


def test_explicit_folder_is_refused_or_entered(tmp_path: Path) -> None:
    folder = enter(tmp_path / "run", tmp_path, CONFIG)
    (folder / "error.log").write_text("it failed before training")
    assert enter(folder, tmp_path, OTHER) == folder
    train(folder, 1)
    with pytest.raises(ConfigError, match=r"\(lr is 2e-05 there, 1e-05 here\). Choose another folder, .*--force"):
        enter(folder, tmp_path, CONFIG)
    (folder / "summary.json").touch()
    assert enter(folder, tmp_path, OTHER) == folder
    for content in (b"[", b"\xff"):
        (folder / "config.yaml").write_bytes(content)
        with pytest.raises(ConfigError, match=r"its config.yaml cannot be read\. Choose .*give way \(--force\)"):
            enter(folder, tmp_path, OTHER)
    with open_run_directory(folder, tmp_path, OTHER, force=True):
        assert (folder / "former-1" / "config.yaml").read_bytes() == b"\xff"
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").touch()
    with pytest.raises(ConfigError, match="holds files, and no run"):
        enter(tmp_path / "home", tmp_path, CONFIG)
    with pytest.raises(ConfigError, match="is a file"):
        enter(tmp_path / "home" / "thesis.tex", tmp_path, CONFIG)
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("section", [None, "policy", "policy.tokenizer", "data"])
def test_a_run_of_a_version_without_some_keys_goes_on_with_their_defaults(section: str | None, tmp_path: Path) -> None:
    config = load_config(PROJECT_ROOT / "examples/configs/sft_tiny.yaml")
    older = copy.deepcopy(config)
    new = {"policy": ["logprob_chunk_size"], "policy.tokenizer": ["chat_template"], "data": ["on_bad_line", "exclude"]}
    for path in [section] if section else new:
        for key in new[path]:
            functools.reduce(operator.getitem, path.split("."), older).pop(key, None)
    folder = enter(tmp_path / "run", tmp_path, older)
    train(folder, 1)
    assert enter(folder, tmp_path, config) == folder
    assert not (folder / "changes.jsonl").exists()
    config["data"]["on_bad_line"] = "skip"
    with pytest.raises(ConfigError, match=r'\(data.on_bad_line is "error" there, "skip" here\)'):
        enter(folder, tmp_path, config)


def test_a_new_key_had_the_value_of_the_key_that_it_follows(tmp_path: Path) -> None:
    """Validation sampled as training did before it had keys of its own."""
    config = load_config(PROJECT_ROOT / "examples/configs/grpo_tiny.yaml", ["policy.generation.temperature=0.7"])
    older = copy.deepcopy(config)
    for key in ("val_temperature", "val_top_p", "val_top_k", "stop_strings", "stop_token_ids"):
        del older["policy"]["generation"][key]
    folder = enter(tmp_path / "run", tmp_path, older)
    train(folder, 1)
    changed = copy.deepcopy(config)
    changed["policy"]["generation"]["val_temperature"] = 0.0
    assert changed_on_resume(folder, changed).told == "policy.generation.val_temperature is 0.7 there, 0.0 here"
    assert enter(folder, tmp_path, config) == folder


@pytest.mark.parametrize(
    ("path", "by_request", "by_itself"),
    [
        ("policy.offload_optimizer_for_logprob", True, True),
        ("policy.generation.vllm_cfg.gpu_memory_utilization", True, False),
        ("policy.generation.vllm_cfg.precision", False, False),
    ],
)
def test_what_moves_memory_alone_may_change(path: str, by_request: bool, by_itself: bool) -> None:
    assert may_change(path, "grpo", by_request=True) == by_request
    assert may_change(path, "grpo", by_request=False) == by_itself


@pytest.mark.slow
def test_a_run_may_go_on_with_some_other_values(tmp_path: Path) -> None:
    config = load_config(PROJECT_ROOT / "examples/configs/grpo_tiny.yaml")
    folder = enter(tmp_path / "run", tmp_path, config)
    train(folder, 20)
    paths = list(leaves(config))
    decided = [path for path in paths if may_change(path, "grpo", by_request=True)]
    by_means = [path for path in decided if may_change(path, "grpo", by_request=False)]
    listed = [*MEANS, *DECIDED_ANEW, *(f"grpo.{key}" for key in OF_THE_ALGORITHM)]
    assert all(any(f"{path}.".startswith(f"{each}.") for path in decided) for each in listed), "all are keys"
    assert len(by_means) > 40
    assert len(decided) > len(by_means) + 20
    only_decided = [path for path in decided if path not in by_means]
    others = [path for path in paths if path not in decided]
    for path in (*by_means[::20], *only_decided[::8], "grpo.val_period", *others[::25], "sft.val_period"):
        other = copy.deepcopy(config)
        *sections, key = path.split(".")
        functools.reduce(operator.getitem, sections, other)[key] = "something else"
        if path in decided:
            assert enter(folder, tmp_path, other) == folder
            enter(folder, tmp_path, config)
        else:
            with pytest.raises(ConfigError, match=rf'\({re.escape(path)} is .* there, "something else" here\)'):
                enter(folder, tmp_path, other)
        if path in by_means:
            assert enter(None, folder, other) == folder, "without its name, too"
            enter(folder, tmp_path, config)


def test_what_a_run_goes_on_with_is_noted_with_its_step(tmp_path: Path) -> None:
    config: Any = load_config(PROJECT_ROOT / "examples/configs/sft_tiny.yaml")
    folder = enter(tmp_path / "run", tmp_path, config)
    changed = copy.deepcopy(config)
    changed["policy"]["megatron_cfg"]["optimizer"]["lr"] = 0.5
    enter(folder, tmp_path, changed)
    assert not (folder / "changes.jsonl").exists(), "nothing was trained"
    enter(folder, tmp_path, config)
    train(folder, 20)
    told: list[str] = []
    with open_run_directory(folder, tmp_path, changed, told=told.append):
        pass
    old, key = config["policy"]["megatron_cfg"]["optimizer"]["lr"], "policy.megatron_cfg.optimizer.lr"
    assert told == [f"From step 20 on, {key} is 0.5 instead of {old}."]
    with open_run_directory(folder, tmp_path, changed, told=told.append):
        assert len(told) == 1, "once"
    expected = {"step": 20, "changes": {key: {"before": str(old), "after": "0.5"}}}
    assert [dict(record) for record in read_changes(folder / "changes.jsonl")] == [expected]
    other_default = enter(None, folder, config)
    assert other_default.name == "run-2", "only by request"


def test_a_folder_without_a_checkpoint_takes_any_configuration(tmp_path: Path) -> None:
    folder = enter(tmp_path / "run", tmp_path, CONFIG)
    for name in ("metrics.jsonl", "samples.jsonl", "notes.txt"):
        (folder / name).write_text("of the first")
    (folder / "tensorboard").mkdir()
    assert enter(folder, tmp_path, CONFIG) == folder
    assert (folder / "metrics.jsonl").exists(), "it is the same run"
    assert enter(folder, tmp_path, OTHER) == folder
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "config.yaml", "former-1", "notes.txt"]
    former = {path.name for path in (folder / "former-1").iterdir()}
    assert former == {"config.yaml", "metrics.jsonl", "samples.jsonl", "tensorboard"}
    (folder / "metrics.jsonl").touch()
    enter(folder, tmp_path, CONFIG)
    assert (folder / "former-2" / "metrics.jsonl").exists()
    (folder / "metrics.jsonl").touch()
    (folder / "evaluation.json").touch()
    with pytest.raises(ConfigError, match="another configuration"):
        enter(folder, tmp_path, OTHER)


@pytest.mark.parametrize("state", ["goes on", "finished", "unreadable"])
def test_force_deletes_no_checkpoint(state: str, tmp_path: Path) -> None:
    folder = enter(tmp_path / "run", tmp_path, CONFIG)
    train(folder, 7)
    if state == "finished":
        (folder / "summary.json").write_text("{}")
    if state == "unreadable":
        (folder / "config.yaml").write_text("[")
    told: list[str] = []
    with open_run_directory(folder, tmp_path, OTHER, force=True, told=told.append) as entered:
        assert entered == folder
    assert told == [f"The run that was there has given way: it is in {folder}/former-1."]
    assert Checkpoints(folder, None, True).latest() is None
    kept = Checkpoints(folder / "former-1", None, True).latest()
    assert kept is not None
    assert (kept.folder / "policy" / "weights").read_text() == "w"
    assert not (folder / "summary.json").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with (
        pytest.raises(ConfigError, match="holds files, and no run"),
        open_run_directory(tmp_path / "mine", tmp_path, OTHER, force=True),
    ):
        pass


def test_what_another_run_has_otherwise_is_listed(tmp_path: Path) -> None:
    train(enter(tmp_path / "run", tmp_path, CONFIG | {"lr": 1}), 1)
    enter(tmp_path / "run", tmp_path, CONFIG | {"lr": 1.0})
    other = {"grpo": {"seed": 2, "names": []}, "lr": True, "new": "\n"}
    expected = (
        'grpo.seed is 1 there, 2 here; grpo.names is ["a", "b"] there, [] here; new is absent there, "\\n" here; '
        "and 1 more"
    )
    with pytest.raises(ConfigError) as error:
        enter(tmp_path / "run", tmp_path, other)
    assert f"another configuration ({expected}). Choose" in str(error.value)


def leaves(node: dict[str, Any], path: str = "") -> Iterator[str]:
    for key, value in node.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{path}{key}.")
        else:
            yield f"{path}{key}"


def test_a_running_run_is_left_alone(tmp_path: Path) -> None:
    default = tmp_path / "run"
    with open_run_directory(None, default, CONFIG) as first:
        assert enter(None, default, CONFIG).name == "run-2"
        with pytest.raises(ConfigError, match="another process is running it"):
            enter(first, default, CONFIG)
    assert enter(None, default, CONFIG) == first
