"""What is installed from a wheel works without the checkout: it brings the shipped configurations, data and models."""

import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from example_runs import python_path
from patience import PATIENCE_S

from nemo_rl_offload.config.loader import PROJECT_ROOT

Command = Callable[..., subprocess.CompletedProcess[str]]
CONFIGS = sorted(path.name for path in (PROJECT_ROOT / "examples/configs").glob("*.yaml"))


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package's folder, from a wheel that was built here."""
    built, installation = tmp_path_factory.mktemp("built"), tmp_path_factory.mktemp("installation")
    hatchling = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(built)]
    subprocess.run(hatchling, cwd=PROJECT_ROOT, check=True, capture_output=True)
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installation)
    return installation / "nemo_rl_offload"


@pytest.fixture
def command(installed: Path, tmp_path: Path) -> Command:
    """Run the installed command in an empty folder."""
    env = {**os.environ, "PYTHONPATH": python_path(installed.parent), "CUDA_VISIBLE_DEVICES": ""}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-m", "nemo_rl_offload.cli", *arguments]
        return subprocess.run(
            words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )

    return run


def test_it_brings_the_examples_and_nothing_to_make_them_with(installed: Path) -> None:
    assert sorted(path.name for path in (installed / "examples/configs").iterdir()) == CONFIGS
    assert (installed / "examples/models/tiny_teacher/model.safetensors").is_file()
    assert (installed / "examples/data/spelling_pairs_train.jsonl").is_file()
    assert not list((installed / "examples").rglob("*.py"))


@pytest.mark.sampled
@pytest.mark.parametrize("words", [("check",), ("plan", "--gpu", "h100-80gb")])
@pytest.mark.parametrize("algorithm", ["grpo", pytest.param("dpo", marks=pytest.mark.slow)])
def test_the_shipped_examples(installed: Path, command: Command, words: tuple[str, ...], algorithm: str) -> None:
    process = command(*words, str(installed / f"examples/configs/{algorithm}_tiny.yaml"))
    assert process.returncode == 0, process.stderr
    assert "warning" not in process.stdout, "the model and the data are there"


@pytest.mark.slow
def test_a_file_of_ones_own_inherits_a_shipped_one(tmp_path: Path, command: Command) -> None:
    (tmp_path / "my.yaml").write_text("defaults: examples/configs/grpo_tiny.yaml\ngrpo: {max_num_steps: 7}\n")
    assert command("check", "my.yaml").returncode == 0
    (tmp_path / "alone.yaml").write_text("grpo: {max_num_steps: 7}\n")
    process = command("check", "alone.yaml")
    assert process.returncode == 2
    assert "policy.model_name: missing value" in process.stderr


@pytest.mark.sampled
@pytest.mark.slow
def test_a_run_without_any_file_and_its_export(tmp_path: Path, command: Command) -> None:
    short = ("grpo.max_num_steps=1", "grpo.val_period=0", "grpo.val_at_start=false")
    process = command("run", "grpo", "--run-dir", "run", *short)
    assert process.returncode == 0, process.stderr
    assert (tmp_path / "run/summary.json").is_file()
    process = command("export", "run/step_1", "model")
    assert process.stdout == "Wrote model\n"
    assert process.stderr == "", "what other libraries say is kept from the user"
    assert (tmp_path / "model/model.safetensors").is_file()


ENGINE_PROGRAM = """
import sys
import torch
from torch import nn
from nemo_rl_offload import OffloadOptions, offload_activations
from nemo_rl_offload.offload import HostBackend, OffloadEngine

model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Sigmoid())
x = torch.randn(32, 64)

def gradients():
    model.zero_grad()
    model(x).sum().backward()
    return [each.grad.clone() for each in model.parameters()]

expected = gradients()
with offload_activations(model, ["1", "3"], host_memory_budget="1MiB", min_tensor_bytes=0) as offload:
    assert all(map(torch.equal, gradients(), expected))
assert offload.stats().bytes_out == 2 * 32 * 64 * 4

engine = OffloadEngine(HostBackend(), host_memory_budget_bytes=1 << 20, min_tensor_bytes=0)
hidden = x.clone().requires_grad_() * 1
with (region := engine.region("part", 0)):
    output = torch.exp(hidden)
engine.commit(region, output).sum().backward()
assert engine.stats().bytes_out == engine.stats().bytes_in == x.nbytes
engine.close()
for name in ("megatron", "ray", "transformers", "hydra", "pydantic"):
    try:
        __import__(name)
    except ImportError:
        continue
    sys.exit(f"{name} is there")
try:
    from nemo_rl_offload.adapters import megatron_core
    megatron_core.install()
except ModuleNotFoundError as error:
    print("missing:", error.name)
"""


def requirements(name: str, found: set[str]) -> set[str]:
    """Names of a distribution and of all that it requires here."""
    try:
        requires = distribution(name).requires or []
    except PackageNotFoundError:
        return found
    found.add(name)
    for line in requires:
        needed = re.split(r"[^\w.-]", line)[0]
        if "extra ==" not in line and needed not in found:
            requirements(needed, found)
    return found


@pytest.mark.slow
def test_the_engine_where_there_is_torch_alone(installed: Path, tmp_path: Path) -> None:
    bare = tmp_path / "site"
    bare.mkdir()
    (bare / "nemo_rl_offload").symlink_to(installed)
    for name in ("torch", "triton", "numpy", "psutil"):
        for each in requirements(name, set()):
            files = distribution(each).files or []
            for top in {file.parts[0] for file in files if ".." not in file.parts}:
                source = Path(str(distribution(each).locate_file(top)))
                if source.exists() and not (bare / top).exists():
                    (bare / top).symlink_to(source)
    code = f"import sys; sys.path.insert(0, {str(bare)!r})\n" + ENGINE_PROGRAM
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "missing: megatron\n"
