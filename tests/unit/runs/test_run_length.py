"""A run may get another length where its checkpoint lets it go on; else it stays as it is."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from run_folders import CONFIG, enter, save, write

from nemo_rl_offload.errors import CheckpointError, ConfigError
from nemo_rl_offload.runs.run_directory import Checkpoints, length_on_resume

SFT = {**CONFIG, "algorithm": "sft", "sft": {"max_num_steps": 100, "max_num_epochs": 1}, "grpo": {"max_num_steps": 9}}


def finished_run(tmp_path: Path) -> Path:
    """Of 100 steps, with a checkpoint of its last."""
    folder = enter(tmp_path / "run", tmp_path, SFT)
    save(Checkpoints(folder, None, True), 100, {}, None, write)
    (folder / "summary.json").write_text("the summary")
    assert length_on_resume(folder, SFT) == {}
    return folder


@pytest.mark.parametrize("length", [{"max_num_steps": 200}, {"max_num_epochs": 3}, {"max_num_epochs": None}])
def test_a_finished_run_may_be_made_longer(length: dict[str, Any], tmp_path: Path) -> None:
    folder = finished_run(tmp_path)
    longer = {**SFT, "sft": {**SFT["sft"], **length}}
    ((key, value),) = length.items()
    assert length_on_resume(folder, longer) == {f"sft.{key}": value}
    assert enter(None, folder, longer) == tmp_path / "run-2", "without its name it is left alone"
    assert enter(folder, tmp_path, longer) == folder
    assert not (folder / "summary.json").exists()
    assert (folder / "former_summary.json").read_text() == "the summary"
    assert yaml.safe_load((folder / "config.yaml").read_text()) == longer


TOO_FEW = (
    r"another configuration \(sft.max_num_steps is 100 there, 99 here; 100 steps are taken, and "
    r"sft.max_num_steps may be as many or more; the command goes on there with sft.max_num_steps=100\)"
)


def test_a_length_can_be_corrected_but_not_to_fewer_steps_than_were_taken(tmp_path: Path) -> None:
    folder = finished_run(tmp_path)
    for num_steps in (200, 100):
        config = {**SFT, "sft": {**SFT["sft"], "max_num_steps": num_steps}}
        assert enter(folder, tmp_path, config) == folder
        assert yaml.safe_load((folder / "config.yaml").read_text()) == config
    with pytest.raises(ConfigError, match=TOO_FEW):
        enter(folder, tmp_path, {**SFT, "sft": {**SFT["sft"], "max_num_steps": 99}})
    with pytest.raises(ConfigError, match=r"another configuration \(grpo.max_num_steps is 9 there, 10 here\)"):
        enter(folder, tmp_path, {**SFT, "grpo": {"max_num_steps": 10}})


def test_the_first_command_of_a_run_that_was_made_longer_is_told_what_it_lacks(tmp_path: Path) -> None:
    folder = finished_run(tmp_path)
    longer = {**SFT, "sft": {"max_num_steps": 200, "max_num_epochs": None}}
    assert enter(folder, tmp_path, longer) == folder
    save(Checkpoints(folder, None, True), 150, {}, None, write)
    lacks = r"; the command goes on there with sft.max_num_steps=200 sft.max_num_epochs=null\)"
    with pytest.raises(ConfigError, match=lacks):
        enter(folder, tmp_path, SFT)
    with pytest.raises(ConfigError) as caught:
        enter(folder, tmp_path, {**SFT, "lr": 1.0})
    assert "goes on there" not in str(caught.value), "more than these differ"
    assert enter(folder, tmp_path, longer) == folder


@pytest.mark.parametrize("damage", ["no checkpoint", "a damaged one"])
def test_a_run_that_cannot_go_on_stays_as_it_is(damage: str, tmp_path: Path) -> None:
    folder = finished_run(tmp_path)
    if damage == "no checkpoint":
        shutil.rmtree(folder / "checkpoints")
    else:
        (folder / "checkpoints/step_100/policy/weights").write_text("")
    with pytest.raises((ConfigError, CheckpointError), match=r"another configuration|is damaged"):
        enter(folder, tmp_path, {**SFT, "sft": {**SFT["sft"], "max_num_steps": 101}})
    assert (folder / "summary.json").read_text() == "the summary"
    assert yaml.safe_load((folder / "config.yaml").read_text()) == SFT
