"""What an export finds before it loads a model, and what it leaves where it cannot write."""

import re
import shutil
from collections.abc import Callable
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors import SafetensorError

from nemo_rl_offload.cli.command_line import main
from nemo_rl_offload.config.loader import PROJECT_ROOT, load_config
from nemo_rl_offload.errors import CheckpointError, ResourceError
from nemo_rl_offload.megatron.build.export import _config_of, base_of_adapter, find_checkpoint
from nemo_rl_offload.megatron.build.model import build_model, export_hf
from nemo_rl_offload.runs.run_directory import CONFIG_FILE, Checkpoints

MODEL = PROJECT_ROOT / "examples/models/tiny_speller"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Of a run with two checkpoints, of which nothing could be loaded."""
    folder = tmp_path / "run"
    folder.mkdir()
    checkpoints = Checkpoints(folder, None, True)
    for step in (5, 10):
        checkpoints.begin(step, Path.mkdir)
        checkpoints.commit(step, {}, None, dict)
    config = load_config(PROJECT_ROOT / "examples/configs/sft_tiny.yaml")
    config["policy"]["model_name"] = config["policy"]["tokenizer"]["name"] = str(MODEL)
    (folder / CONFIG_FILE).write_text(yaml.safe_dump(config))
    return folder


def test_a_copy_beside_the_checkpoints_is_in_nobodys_way(run_dir: Path) -> None:
    copied = shutil.copytree(run_dir / "checkpoints" / "step_5", run_dir / "checkpoints" / "step_5_old")
    with pytest.raises(CheckpointError, match=r"no such checkpoint. .* has: step_5, step_10; "):
        find_checkpoint(run_dir / "step_9")
    assert find_checkpoint(run_dir / "step_5_old") == (run_dir, copied)


@pytest.mark.parametrize("name", ["checkpoints", "checkpoints/step_5"])
def test_links_below_the_run_directory_are_not_followed(
    name: str, run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "link").symlink_to(run_dir)
    assert find_checkpoint(tmp_path / "link" / "step_5")[0] == tmp_path / "link"
    (run_dir / name).rename(tmp_path / "elsewhere")
    (run_dir / name).symlink_to(tmp_path / "elsewhere")
    for path in (run_dir / "step_5", run_dir / "checkpoints" / "step_5"):
        assert main(["export", str(path), str(tmp_path / "out")]) == 2
        start = f"error: {run_dir / name} cannot be used: it is a link, and no folder. "
        assert capsys.readouterr().err.startswith(start)


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("file/model", "cannot write to .*/file/model.partial: Not a directory. Name another folder"),
        ("taken", "cannot write to .*/taken.partial: File exists. Name another folder"),
        ("linked", "cannot write to .*/linked.partial: it is a link. Name another folder"),
        ("m" * 250, "cannot write to .*: File name too long. Name another folder"),
        ("dangling", "exists already. Name a new folder"),
    ],
)
def test_where_nothing_can_be_written_is_said_before_the_model_is_loaded(
    out: str, message: str, run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("file", "taken.partial"):
        (tmp_path / name).touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    (tmp_path / "linked.partial").symlink_to(run_dir)
    there = set(tmp_path.rglob("*"))
    assert main(["export", str(run_dir / "step_5"), str(tmp_path / out)]) == 2
    assert re.fullmatch(rf"error: {tmp_path / out}: {message}\.\n", capsys.readouterr().err)
    assert set(tmp_path.rglob("*")) == there


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda folder: shutil.rmtree(folder),
            r"policy.tokenizer.name: '.*/own' is not .* An export has the tokenizer of the run\.",
        ),
        (
            lambda folder: (folder / "tokenizer.json").write_text("{"),
            r"policy.tokenizer.name: no tokenizer loads from '.*/own': .*",
        ),
        (
            lambda folder: (folder / "template.jinja").unlink(),
            r"policy.tokenizer.chat_template: '.*/own/template.jinja' is no .* no file that can be read\..*",
        ),
    ],
)
def test_without_the_runs_tokenizer_nothing_is_written(
    damage: Callable[[Path], None], message: str, run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = shutil.copytree(MODEL, tmp_path / "own")
    (own / "template.jinja").write_text("{{ messages }}")
    config = yaml.safe_load((run_dir / CONFIG_FILE).read_text())
    config["policy"]["tokenizer"] = {"name": str(own), "chat_template": str(own / "template.jinja")}
    (run_dir / CONFIG_FILE).write_text(yaml.safe_dump(config))
    damage(own)
    there = {path for path in tmp_path.iterdir() if path.is_dir()}
    assert main(["export", str(run_dir / "step_5"), str(tmp_path / "out")]) == 2
    assert re.fullmatch(rf"error: {message}\n", capsys.readouterr().err, re.DOTALL)
    assert {path for path in tmp_path.iterdir() if path.is_dir()} == there


@pytest.mark.parametrize("content", ["", "policy: 3", "policy: {}", "policy: {megatron_cfg: 3}", "day: 2024-99-99"])
def test_a_damaged_configuration_is_one_error(
    content: str, run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run_dir / CONFIG_FILE).write_text(content)
    assert main(["export", str(run_dir / "step_5"), str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {run_dir / CONFIG_FILE}: is not the configuration of a run: ")
    assert error.endswith(". Restore it from a copy.\n")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("policy.precision", [1]),
        ("policy.precision", "float31"),
        ("policy.model_name", [1]),
        ("policy.model_name", None),
        ("policy.tokenizer", 3),
        ("policy.tokenizer.name", {"a": 1}),
        ("policy.tokenizer.chat_template", [1]),
        ("policy.tokenizer.chat_template_kwargs", 5),
        ("policy.max_total_sequence_length", "many"),
        ("policy.megatron_cfg", []),
        ("policy.megatron_cfg.model_overrides", 1),
        ("policy.megatron_cfg.optimizer.lr", float("nan")),
        ("data", 1),
        ("data.prompt_template", [1]),
    ],
)
def test_a_value_of_another_shape_is_named(
    key: str, value: object, run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = yaml.safe_load((run_dir / CONFIG_FILE).read_text())
    *sections, last = key.split(".")
    reduce(getitem, sections, config)[last] = value
    (run_dir / CONFIG_FILE).write_text(yaml.safe_dump(config))
    assert main(["export", str(run_dir / "step_5"), str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    start = f"error: {run_dir / CONFIG_FILE}: is not the configuration of a run: {key}: "
    assert error.startswith(start)
    assert re.search(r"is not allowed\. Allowed: .*\. Restore it from a copy\.\n", error)
    assert not (tmp_path / "out").exists()


def test_a_configuration_of_another_version_has_other_keys(run_dir: Path) -> None:
    config = yaml.safe_load((run_dir / CONFIG_FILE).read_text())
    expected = _config_of(run_dir)
    assert config["policy"]["tokenizer"].pop("chat_template") == "default"
    del config["policy"]["megatron_cfg"]["cpu_affinity"]
    del config["policy"]["tokenizer"]["chat_template_kwargs"], config["env"]
    config["policy"]["megatron_cfg"]["former"] = config["former"] = {"key": 1}
    config["cluster"] = "elsewhere"
    (run_dir / CONFIG_FILE).write_text(yaml.safe_dump(config))
    found = _config_of(run_dir)
    assert (found["policy"], found["data"]) == (expected["policy"], expected["data"])


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(
    "error", [SafetensorError("I/O error: No space left on device"), OSError(28, "No space left on device")]
)
def test_a_full_disk_is_one_error_and_leaves_nothing(
    error: Exception, make_policy: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_weights: object, folder: Path) -> None:
        (folder / "model.safetensors").touch()
        raise error

    monkeypatch.setattr("nemo_rl_offload.megatron.build.model.save_torch_state_dict", fail)
    model = build_model(make_policy("fine_grained_activation_offloading=false"), MODEL, num_steps=None)
    with pytest.raises(ResourceError, match=f"{tmp_path / 'out'}: cannot be written: .*No space left on device"):
        export_hf(model, MODEL, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["examples/models/tiny_speller", "./models/mine", "/models/mine", "Qwen/Qwen3-8B"])
def test_an_adapter_names_its_start_model_as_peft_finds_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert base_of_adapter(name, tmp_path / "mine") == str((tmp_path / "mine").resolve())
    cached = tmp_path / "models--Qwen--Qwen3-8B"
    (cached / "snapshots/abc").mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs/main").write_text("abc")
    assert (base_of_adapter(name, cached / "snapshots/abc") == name) == (name == "Qwen/Qwen3-8B")
