"""What was imported from the engine's package still is, and says once where it went."""

import subprocess
import sys

import pytest

DOCUMENTED = ("offload_activations", "OffloadCallback")


@pytest.mark.parametrize(
    "name", ["ActivationOffload", *(pytest.param(name, marks=pytest.mark.slow) for name in DOCUMENTED)]
)
def test_a_moved_import_works_and_warns_once(name: str) -> None:
    code = f"import nemo_rl_offload.offload\nfrom nemo_rl_offload.offload import {name}\nprint({name}.__module__)\n" * 2
    done = subprocess.run([sys.executable, "-W", "always", "-c", code], capture_output=True, text=True, check=True)
    home, _ = done.stdout.split()
    assert done.stderr.count(f"DeprecationWarning: nemo_rl_offload.offload.{name} has moved to {home}") == 1


@pytest.mark.parametrize("name", [DOCUMENTED[0], pytest.param(DOCUMENTED[1], marks=pytest.mark.slow)])
def test_documented_imports_do_not_warn(name: str) -> None:
    subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:__main__", "-c", f"from nemo_rl_offload import {name}"],
        check=True,
    )
