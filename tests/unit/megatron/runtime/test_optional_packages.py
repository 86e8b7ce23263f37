"""A package that is installed and does not import is as though it were absent, whatever it raises."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_rl_offload.config.loader import PROJECT_ROOT
from nemo_rl_offload.observability import doctor

BROKEN = {
    "an empty meta package": ("raise RuntimeError('Found empty meta package.\\nInstall another.')\n", ""),
    "a missing library": ("raise OSError('libcublas.so.13: cannot open shared object file')\n", ""),
    "an undefined symbol": ("raise ImportError('undefined symbol: _ZN3c10')\n", ""),
    "another CUDA": ("import sys\nsys.exit('CUDA 11 is too old')\n", ""),
    "a broken torch part": ("__version__ = '2.20.2'\n", "raise AttributeError('no attribute float8')\n"),
    "no torch part": ("__version__ = '2.20.2'\n", None),
}
"""The outermost module, and the torch part."""
REASONS = {
    "an empty meta package": "RuntimeError: Found empty meta package.",
    "a missing library": "OSError: libcublas.so.13: cannot open shared object file",
    "an undefined symbol": "ImportError: undefined symbol: _ZN3c10",
    "another CUDA": "SystemExit: CUDA 11 is too old",
    "a broken torch part": "AttributeError: no attribute float8",
    "no torch part": "ModuleNotFoundError: No module named 'transformer_engine.pytorch'",
}
PROLOGUE = """
import importlib.util, sys, warnings
from nemo_rl_offload.megatron.runtime import optional_packages as module
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        module.leave_out_broken_packages()
        module.warn_of_broken_packages()
"""


def write_package(folder: Path, outermost: str, pytorch: str | None, name: str = "transformer_engine") -> None:
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(outermost)
    if pytorch is not None:
        (folder / name / "pytorch").mkdir()
        (folder / name / "pytorch/__init__.py").write_text(pytorch)


def run(code: str, folder: Path) -> str:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(PROJECT_ROOT)])}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, cwd=PROJECT_ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_transformer_engine_is_absent_and_told_of_once(kind: str, tmp_path: Path) -> None:
    write_package(tmp_path, *BROKEN[kind])
    asked = """
print(*(warning.message for warning in caught), sep="\\n")
print(module.transformer_engine_problem())
print(importlib.util.find_spec("transformer_engine"))
for name in ("transformer_engine", "transformer_engine.pytorch", "transformer_engine_torch"):
    try:
        __import__(name)
    except ImportError:
        print("absent")
"""
    assert run(PROLOGUE + asked, tmp_path).splitlines() == [
        "packages that are installed, but do not import, are left out as though they were not: transformer_engine "
        f"({REASONS[kind]})",
        REASONS[kind],
        "None",
        *["absent"] * 3,
    ]


@pytest.mark.parametrize("kind", BROKEN)
def test_doctor_says_why(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_package(tmp_path, *BROKEN[kind])
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert doctor.import_problem("transformer_engine.pytorch") == REASONS[kind]


def test_a_sound_one_and_none_at_all_are_left_alone(tmp_path: Path) -> None:
    asked = "print(caught, repr(module.transformer_engine_problem()), 'transformer_engine.pytorch' in sys.modules)\n"
    assert run(PROLOGUE + asked, tmp_path) == "[] 'it is not installed' False\n"
    write_package(tmp_path, "", "")
    assert run(PROLOGUE + asked, tmp_path) == "[] '' True\n"


def test_other_packages_too_and_their_inner_modules(tmp_path: Path) -> None:
    write_package(tmp_path, "raise RuntimeError('built for another torch')\n", None, "flash_attn")
    write_package(tmp_path, "", "raise TypeError('no such signature')\n", "apex")
    asked = """
(warning,) = caught
print(warning.message)
import apex
try:
    import apex.pytorch
except ImportError as error:
    print(error)
"""
    assert run(PROLOGUE + asked, tmp_path).splitlines() == [
        "packages that are installed, but do not import, are left out as though they were not: flash_attn "
        "(RuntimeError: built for another torch)",
        "apex.pytorch does not import: TypeError: no such signature",
    ]


def write_all(folder: Path, kind: str) -> None:
    for name in ("transformer_engine", "apex", "flash_attn"):
        write_package(folder, *BROKEN[kind], name)


@pytest.mark.slow
def test_megatron_is_asked_beside_broken_packages(tmp_path: Path) -> None:
    write_all(tmp_path, "an empty meta package")
    code = """
from nemo_rl_offload.cli.command_line import main
main(["check", "examples/configs/sft_tiny.yaml", "--megatron"])
"""
    assert run(code, tmp_path).startswith("examples/configs/sft_tiny.yaml: no problems\n")


@pytest.mark.slow
def test_a_model_is_built_beside_broken_packages(tmp_path: Path) -> None:
    kind = "a broken torch part"
    write_all(tmp_path, kind)
    code = """
from nemo_rl_offload.megatron.runtime.optional_packages import leave_out_broken_packages
leave_out_broken_packages()
from nemo_rl_offload.megatron.runtime.cpu import install_cpu_support
install_cpu_support()
from pathlib import Path
import torch
from nemo_rl_offload.config.loader import PROJECT_ROOT, load_config
from nemo_rl_offload.megatron.build.model import build_model, init_process_groups
from nemo_rl_offload.megatron.runtime.rendezvous import join_alone
from nemo_rl_offload.megatron.build.transformer_config import resolve_transformer_impl
policy = load_config(PROJECT_ROOT / "examples/configs/sft_tiny.yaml")["policy"]
policy["megatron_cfg"] |= {"transformer_impl": "auto", "fine_grained_activation_offloading": False}
join_alone("gloo")
init_process_groups(policy, seed=1)
model = build_model(policy, PROJECT_ROOT / "examples/models/tiny_speller", num_steps=1)
print(model.transformer_impl)
for has_gpu in (False, True):
    torch.cuda.is_available = lambda: has_gpu
    try:
        resolve_transformer_impl("transformer_engine")
    except ValueError as error:
        print(error)
"""
    refused = "policy.megatron_cfg.transformer_impl: transformer_engine cannot be used here"
    assert run(code, tmp_path).splitlines()[-3:] == [
        "torch",
        f"{refused} ({REASONS[kind]}; there is no GPU); use torch or auto",
        f"{refused} ({REASONS[kind]}); use torch or auto",
    ]
