"""The recipes of CONTRIBUTING.md, followed from outside of the package: its code blocks become distributions, and its
commands are run."""

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from example_runs import python_path
from patience import PATIENCE_S

from nemo_rl_offload.config.loader import PROJECT_ROOT

TEXT = (PROJECT_ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
NAMES = ("focal", "wanted_length")


def write_files(folder: Path) -> list[str]:
    """Write the blocks that follow a file's name; returns the names."""
    blocks = re.findall(r"^`([\w./]+)`:\n\n```\w+\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    for name, content in blocks:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content, encoding="utf-8")
    return [name for name, _ in blocks]


def install(source: Path) -> None:
    """Put beside the modules what an installation makes of `pyproject.toml`."""
    project = tomllib.loads((source / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    metadata = source / f"{project['name']}-{project['version']}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Name: {project['name']}\nVersion: {project['version']}\n")
    groups = [
        "\n".join([f"[{group}]", *(f"{name} = {value}" for name, value in entries.items()), ""])
        for group, entries in project["entry-points"].items()
    ]
    (metadata / "entry_points.txt").write_text("\n".join(groups))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with both distributions, as CONTRIBUTING.md has them."""
    assert {Path(name).parent.name for name in write_files(tmp_path)} == {*NAMES}
    for name in NAMES:
        assert f"uv pip install -e {name}\n" in TEXT
        install(tmp_path / name)
    return tmp_path


def commands(word: str, name: str) -> list[str]:
    """The commands of CONTRIBUTING.md that begin with a word and are about a distribution."""
    lines = re.findall(rf"^nemo-rl-offload ({word} .*)$", TEXT, re.MULTILINE)
    return [line for line in lines if name in line]


def execute(folder: Path, command: str, *further: str) -> subprocess.CompletedProcess[str]:
    paths = python_path(*(folder / name for name in NAMES), PROJECT_ROOT)
    return subprocess.run(
        [sys.executable, "-m", "nemo_rl_offload.cli", *shlex.split(command), *further],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        timeout=PATIENCE_S,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_check_knows_them(name: str, folder: Path) -> None:
    (command,) = commands("check", name)
    checked = execute(folder, command)
    assert (checked.returncode, checked.stderr) == (0, "")
    assert "warning" not in checked.stdout
    wrong = f"{command.split()[1]} {'focal.gamma=-1' if name == 'focal' else 'env.wanted_length.num_characters=0'}"
    assert "is not allowed. Allowed: a" in execute(folder, f"check {wrong}").stderr


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("name", NAMES)
def test_two_steps(name: str, folder: Path) -> None:
    (command,) = commands("run", name)
    done = execute(folder, command, "--format", "json", "--run-dir", "out")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["algorithm"], summary["steps"]) == (command.split()[1], 2)
    assert summary["offload"]["bytes_in"] == summary["offload"]["bytes_out"] > 0
    records = list(map(json.loads, (folder / "out/metrics.jsonl").read_text().splitlines()))
    trained = [record["metrics"] for record in records if record["prefix"] == "train"]
    if name == "focal":
        assert summary["validation"]["last"] != summary["validation"]["first"], "the weights have changed"
    else:
        assert all(0 < metrics["reward"] <= 1 for metrics in trained)
        assert any(metrics["reward"] * 16 % 1 for metrics in trained), "lengths are scored, not answers"
