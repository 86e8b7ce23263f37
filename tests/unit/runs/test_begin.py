"""A new run begins with another one's checkpoint, where that has a meaning for it."""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from run_folders import enter, save, write

from nemo_rl_offload.config.loader import PROJECT_ROOT, load_config
from nemo_rl_offload.errors import CheckpointError, ConfigError
from nemo_rl_offload.runs.begin import began_from, begin_from, changed_from
from nemo_rl_offload.runs.comparison import differences
from nemo_rl_offload.runs.origin import origin_of, read_origin
from nemo_rl_offload.runs.run_directory import Checkpoints, open_run_directory

STATE = {
    "data": {"epoch": 0, "position": 5},
    "validation": {"first": None, "last": None},
    "train": {},
    "validation_metrics": {},
    "num_skipped": 0,
}
CHANGES = {
    "sft": {
        "policy.megatron_cfg.optimizer.lr": None,
        "sft.val_period": None,
        "policy.train_micro_batch_size": None,
        "policy.train_global_batch_size": "its place in the data",
        "data.train.path": "its place in the data",
        "sft.seed": "its place in the data",
        "policy.megatron_cfg.optimizer.adam_beta1": "its optimizer's state",
        "policy.quant_cfg": "its optimizer's state",
        "algorithm": "its place in the data is of sft",
    },
    "grpo": {
        "loss_fn.ratio_clip_max": None,
        "policy.generation.temperature": None,
        "policy.train_global_batch_size": None,
        "env.reasoning_gym.task": "its place in the data",
        "data.train.seed": "its place in the data",
    },
}


def make(tmp_path: Path, algorithm: str) -> tuple[Path, Any]:
    """A run with a checkpoint of step 5, and its configuration."""
    config = load_config(PROJECT_ROOT / f"examples/configs/{algorithm}_tiny.yaml", [f"{algorithm}.max_num_steps=9"])
    folder = enter(tmp_path / "first", tmp_path, config)
    save(Checkpoints(folder, None, True), 5, STATE, None, write)
    return folder, config


@pytest.mark.parametrize(
    ("algorithm", "path", "said"), [(name, *each) for name, some in CHANGES.items() for each in some.items()]
)
def test_what_a_run_that_takes_over_everything_may_have_otherwise(
    algorithm: str, path: str, said: str | None, tmp_path: Path
) -> None:
    run_dir, config = make(tmp_path, algorithm)
    other = copy.deepcopy(config)
    *sections, key = path.split(".")
    node = other
    for section in sections:
        node = node[section]
    node[key] = "dpo" if key == "algorithm" else "something else"
    if said is None:
        origin = begin_from(run_dir / "step_5", other, weights_only=False)
        assert origin == {
            "checkpoint": str(run_dir / "checkpoints" / "step_5"),
            "takes": "everything",
            "start_weights": None,
        }
        told = changed_from(run_dir / "step_5", other)
        assert [line.split()[0] for line in told] == [path]
        assert all(line.endswith(" of that run.") and 'is "something else" instead of' in line for line in told)
        assert changed_from(run_dir / "step_5", config) == []
    else:
        with pytest.raises(ConfigError, match=f"{said}.*{path} is .* there.*--weights-only"):
            begin_from(run_dir / "step_5", other, weights_only=False)
    assert begin_from(run_dir / "step_5", other, weights_only=True)["takes"] == "weights"


def test_a_run_that_would_take_no_step_is_refused(tmp_path: Path) -> None:
    run_dir, config = make(tmp_path, "sft")
    config["sft"]["max_num_steps"] = 5
    with pytest.raises(ConfigError, match=r"^sft.max_num_steps: 5 steps are taken already .* Give more than 5"):
        begin_from(run_dir / "step_5", config, weights_only=False)
    begin_from(run_dir / "step_5", config, weights_only=True)


def test_a_checkpoint_that_is_none_is_refused(tmp_path: Path) -> None:
    run_dir, config = make(tmp_path, "sft")
    with pytest.raises(CheckpointError, match=r"no such checkpoint\. .* has: step_5; checkpointing\.keep_top_k"):
        begin_from(run_dir / "step_6", config, weights_only=True)
    with pytest.raises(CheckpointError, match="is a run, with step_5"):
        begin_from(run_dir, config, weights_only=True)
    (run_dir / "config.yaml").unlink()
    with pytest.raises(ConfigError, match=r"config\.yaml cannot be read"):
        begin_from(run_dir / "step_5", config, weights_only=False)
    (run_dir / "checkpoints/step_5/policy/weights").write_text("")
    with pytest.raises(CheckpointError, match="damaged"):
        begin_from(run_dir / "step_5", config, weights_only=True)


def test_start_weights_stay_those_of_the_first_run(tmp_path: Path) -> None:
    run_dir, config = make(tmp_path, "grpo")
    weights = begin_from(run_dir / "step_5", config, weights_only=True)
    with open_run_directory(tmp_path / "second", tmp_path, config, origin=weights) as second:
        save(Checkpoints(second, None, True), 7, STATE, None, write)
    third = begin_from(second / "step_7", config, weights_only=False)
    assert third["start_weights"] == weights["start_weights"] == str(run_dir / "checkpoints" / "step_5")
    assert third["checkpoint"] == str(second / "checkpoints" / "step_7")


def test_a_run_keeps_its_origin(tmp_path: Path) -> None:
    run_dir, config = make(tmp_path, "grpo")
    weights, everything = (origin_of(run_dir / "checkpoints" / "step_5", takes) for takes in ("weights", "everything"))

    def enter_from(folder: Path | None, origin: Any) -> Path:
        with open_run_directory(folder, tmp_path / "new", config, origin=origin) as entered:
            return entered

    new = enter_from(tmp_path / "new", weights)
    assert read_origin(new) == weights
    assert enter_from(new, everything) == new, "nothing was trained"
    enter_from(new, weights)
    save(Checkpoints(new, None, True), 2, STATE, None, write)
    assert enter_from(new, weights) == new
    assert enter_from(new, None) == new, "the same command goes on, and so does one without the origin"
    assert read_origin(new) == weights
    with pytest.raises(
        ConfigError, match=r'--from-checkpoint is ".*step_5 \(weights\)" there, .* \(everything\)" here'
    ):
        enter_from(new, everything)
    with pytest.raises(ConfigError, match=r"--from-checkpoint is absent there"):
        enter_from(run_dir, weights)
    assert enter_from(None, weights) == new
    assert enter_from(None, everything) == tmp_path / "new-2"
    (new / "origin.json").write_text(json.dumps({"checkpoint": 1}))
    with pytest.raises(ConfigError, match=r"origin\.json: is damaged"):
        read_origin(new)


PEFT = {"enabled": True, "dim": 8, "alpha": 32, "target_modules": ["linear_qkv"], "exclude_modules": []}


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize(
    ("there", "here", "said"),
    [
        ({}, {"enabled": False}, "its run has adapters"),
        ({"enabled": False}, {}, "its run has not adapters"),
        ({}, {"dim": 16}, r"adapters of other settings \(policy\.megatron_cfg\.peft\.dim is 8 there\)"),
        ({}, {"alpha": 320}, r"peft\.alpha is 32 there"),
        ({}, {"target_modules": ["linear_proj"]}, "peft.target_modules is"),
        ({}, {}, ""),
    ],
)
def test_adapters_go_on_as_the_same_adapters(
    there: dict[str, Any], here: dict[str, Any], said: str, weights_only: bool, tmp_path: Path
) -> None:
    config = load_config(PROJECT_ROOT / "examples/configs/sft_tiny.yaml", ["sft.max_num_steps=9"])
    config["policy"]["megatron_cfg"]["peft"] |= PEFT | there
    folder = enter(tmp_path / "first", tmp_path, config)
    save(Checkpoints(folder, None, True), 5, STATE, None, write)
    other = copy.deepcopy(config)
    other["policy"]["megatron_cfg"]["peft"] |= PEFT | here
    if not said:
        assert begin_from(folder / "step_5", other, weights_only=weights_only)
        return
    with pytest.raises(ConfigError, match=said):
        begin_from(folder / "step_5", other, weights_only=weights_only)


def test_a_reference_is_not_taken_from_adapters(tmp_path: Path) -> None:
    config = load_config(PROJECT_ROOT / "examples/configs/sft_tiny.yaml", ["sft.max_num_steps=9"])
    config["policy"]["megatron_cfg"]["peft"] |= PEFT
    folder = enter(tmp_path / "first", tmp_path, config)
    save(Checkpoints(folder, None, True), 5, STATE, None, write)
    dpo = load_config(PROJECT_ROOT / "examples/configs/dpo_tiny.yaml")
    dpo["policy"]["megatron_cfg"]["peft"] |= PEFT
    dpo["policy"]["model_name"] = config["policy"]["model_name"]
    with pytest.raises(ConfigError, match="with adapters the reference is the model without them"):
        begin_from(folder / "step_5", dpo, weights_only=True)


@pytest.mark.parametrize(
    ("num_layers", "there", "here"), [(n, *pair) for n in (0, 1) for pair in ((0, None), (None, 0))]
)
def test_layers_for_further_tokens_that_one_side_leaves_out(
    num_layers: int, there: int | None, here: int | None, tmp_path: Path
) -> None:
    (tmp_path / "model").mkdir()
    content = {"model_type": "glm4_moe", "num_hidden_layers": 4, "num_nextn_predict_layers": num_layers}
    (tmp_path / "model/config.json").write_text(json.dumps(content))
    changes = ["sft.max_num_steps=9", f"policy.model_name={tmp_path / 'model'}", "policy.tokenizer.name=x"]
    config: Any = load_config(PROJECT_ROOT / "examples/configs/sft_tiny.yaml", changes)
    config["policy"]["megatron_cfg"]["mtp_num_layers"] = there
    run_dir = enter(tmp_path / "first", tmp_path, config)
    save(Checkpoints(run_dir, None, True), 5, STATE, None, write)
    config = copy.deepcopy(config)
    config["policy"]["megatron_cfg"]["mtp_num_layers"] = here
    for weights_only in (True, False):
        if num_layers and (there == 0 or not weights_only):
            with pytest.raises(ConfigError, match=r"Set that to (0|null)"):
                begin_from(run_dir / "step_5", config, weights_only=weights_only)
        else:
            begin_from(run_dir / "step_5", config, weights_only=weights_only)


def test_weights_of_further_tokens_by_the_names_of_an_earlier_version() -> None:
    path, key = "policy.megatron_cfg.model_overrides", "mtp_loss_scaling_factor"
    there = {f"{path}.{key}": 0.3}
    assert not differences(there, {path: {}, f"policy.megatron_cfg.{key}": 0.3})
    assert not differences(there, there)
    assert list(differences(there, {path: {}, f"policy.megatron_cfg.{key}": 0.1})) == [f"policy.megatron_cfg.{key}"]
    assert list(differences({}, {"policy.megatron_cfg.mtp_num_layers": None})) == []
    both = {"policy.quant_cfg": None, "policy.generation.quant_cfg": None}  # the second's default is the first
    assert list(differences({}, both)) == []
    assert list(differences({}, {**both, "policy.generation.quant_cfg": "W4A16_NVFP4_CFG"})) == [[*both][1]]
    assert list(differences({}, {"policy.megatron_cfg.mtp_num_layers": 0})) == ["policy.megatron_cfg.mtp_num_layers"]


@pytest.mark.parametrize("weights_only", [False, True])
def test_a_run_with_checkpoints_of_its_own_goes_on_without_the_one_that_it_began_with(
    weights_only: bool, tmp_path: Path
) -> None:
    """Which its own run may have removed since: `checkpointing.keep_top_k`."""
    first, config = make(tmp_path, "sft")
    origin = begin_from(first / "step_5", config, weights_only=weights_only)
    with open_run_directory(tmp_path / "second", tmp_path, config, origin=origin) as second:
        assert began_from(second, first / "step_5", weights_only=weights_only) is None, "it begins"
        save(Checkpoints(second, None, True), 6, STATE, None, write)
    shutil.rmtree(first / "checkpoints" / "step_5")
    for named in (first / "step_5", first / "checkpoints" / "step_5"):
        assert began_from(second, named, weights_only=weights_only) == origin
    assert began_from(second, first / "step_5", weights_only=not weights_only) is None
    assert began_from(second, first / "step_4", weights_only=weights_only) is None
    assert began_from(tmp_path / "third", first / "step_5", weights_only=weights_only) is None
