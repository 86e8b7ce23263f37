"""Offloading needs few packages; what trains is an extra, which `uv run` takes by itself."""

import re
import subprocess
import sys
import tomllib
from importlib import metadata

import pytest

from nemo_rl_offload import cli
from nemo_rl_offload.cli import command_line
from nemo_rl_offload.config.loader import PROJECT_ROOT

PROJECT = tomllib.loads((PROJECT_ROOT / "pyproject.toml").read_text())
ENGINE = """
import sys, warnings
import torch
before = set(sys.modules)  # torch takes whatever else is there
warnings.simplefilter("ignore")
from nemo_rl_offload import OffloadOptions, offload_activations
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
with offload_activations(model, ["0", "2"], min_tensor_bytes=0) as offload:
    model(torch.ones(4, 8)).sum().backward()
assert offload.stats()
import nemo_rl_offload.paged_stash.stash
print(*{name.partition(".")[0] for name in set(sys.modules) - before})
"""


def name_of(requirement: str) -> str:
    return re.split(r"[^\w-]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def with_what_they_need(names: set[str]) -> set[str]:
    """Distributions, and all that they require."""
    found: set[str] = set()
    while names:
        name = names.pop()
        if name not in found:
            found.add(name)
            try:
                required = metadata.requires(name) or []
            except metadata.PackageNotFoundError:  # of another platform
                continue
            names |= {name_of(each) for each in required if "extra ==" not in each}
    return found


@pytest.mark.slow
def test_the_engine_imports_what_it_depends_on_alone() -> None:
    done = subprocess.run([sys.executable, "-c", ENGINE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    base = with_what_they_need({name_of(each) for each in PROJECT["project"]["dependencies"]})
    of_modules = metadata.packages_distributions()
    foreign = {
        module
        for module in done.stdout.split()
        if module in of_modules and not {name_of(name) for name in of_modules[module]} & base
    }
    assert foreign <= {"nemo_rl_offload"}


def test_what_trains_comes_by_default() -> None:
    assert PROJECT["dependency-groups"]["train"] == ["nemo-rl-offload[train]"]
    assert PROJECT["tool"]["uv"]["default-groups"] == ["train"]
    train = {name_of(each) for each in PROJECT["project"]["optional-dependencies"]["train"]}
    assert train.isdisjoint(map(name_of, PROJECT["project"]["dependencies"]))


def test_a_command_without_what_trains_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "find_spec", lambda name: None)
    assert cli.main(["run", "grpo"]) == 2
    said = capsys.readouterr().err
    assert all(name in said for name in (*cli.OF_TRAINING, "uv sync --extra train"))


def test_an_interrupt_before_a_command_begins_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: object) -> int:
        raise KeyboardInterrupt

    ignored: list[int] = []
    monkeypatch.setattr(command_line, "main", interrupted)
    monkeypatch.setattr(cli.signal, "signal", lambda number, _: ignored.append(number))
    assert cli.main(["doctor"]) == 130
    assert capsys.readouterr().err == "Interrupted.\n"
    assert len(ignored) == 2
