"""A run that goes on warns of files that changed under their names; one that starts does not."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_offload.cli import command_line
from nemo_rl_offload.cli.command_line import main
from nemo_rl_offload.config.loader import PROJECT_ROOT
from nemo_rl_offload.runs.run_directory import CHECKPOINTS, INPUTS_FILE, WARNINGS_FILE


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Start or resume a run whose training is a new checkpoint; returns what was warned of."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(PROJECT_ROOT / "examples/models/tiny_speller", "model")
    Path("train.jsonl").write_text('{"messages": []}\n')

    def run(step: int | None, *overrides: str) -> str:
        def train(_algorithm: str, _config: Any, run_dir: Path, _console: Any) -> None:
            if step is not None:
                (run_dir / CHECKPOINTS / f"step_{step}").mkdir(parents=True)

        monkeypatch.setattr(command_line, "_train", train)
        paths = [f"data.{split}.path=train.jsonl" for split in ("train", "validation")]
        given = ["policy.model_name=model", "data.validation.exclude=[]", *paths, *overrides]
        config = PROJECT_ROOT / "examples/configs/sft_tiny.yaml"
        assert main(["run", "sft", "--config", str(config), "--run-dir", "run", *given]) == 0
        lines = capsys.readouterr().out.splitlines()
        return "\n".join(line for line in lines if line.startswith("warning: ") and "changed since" in line)

    return run


def test_changed_data_are_warned_of_once(start: Callable[..., str], tmp_path: Path) -> None:
    assert start(3) == ""
    assert start(None) == ""
    Path("train.jsonl").write_text('{"messages": 1}\n')
    there = f"{tmp_path}/train.jsonl has other content (17 bytes then, 16 now)"
    warned = start(4)
    assert warned.count(f"data.train.path: changed since this run was last started: {there}. The run keeps") == 1
    assert f"data.validation.path: changed since this run was last started: {there}." in warned
    kept = Path("run", WARNINGS_FILE).read_text().splitlines()
    assert [line.partition(" changed")[0] for line in kept] == [
        "step 3: warning: data.train.path:",
        "step 3: warning: data.validation.path:",
    ]
    assert start(None) == ""


def test_adapters_do_not_go_on_beside_other_weights(
    start: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    peft = "policy.megatron_cfg.peft"
    adapters = (f"{peft}.enabled=true", f"{peft}.target_modules=[linear_proj]")
    assert start(3, *adapters) == ""
    weights = Path("model", "model.safetensors")
    *others, last = weights.read_bytes()
    weights.write_bytes(bytes([*others, last ^ 1]))
    with Path("model", "config.json").open("a") as file:
        file.write(" ")
    with pytest.raises(AssertionError):
        start(None, *adapters)
    assert "have adapters alone, which belong to the weights that were there" in capsys.readouterr().err


def test_a_run_that_starts_anew_does_not_care(start: Callable[..., str]) -> None:
    assert start(None) == ""
    Path("train.jsonl").write_text("{}\n")
    assert start(None, "sft.seed=2") == "", "nothing was trained, so that any configuration may enter"


def test_of_an_earlier_versions_run_nothing_is_known(start: Callable[..., str]) -> None:
    start(3)
    Path("run", INPUTS_FILE).unlink()
    Path("train.jsonl").write_text("{}\n")
    assert start(None) == ""
    assert Path("run", INPUTS_FILE).exists()
