"""Output that cannot be written, or not as it is: one message, and no traceback."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_rl_offload.config.loader import PROJECT_ROOT


@pytest.mark.parametrize("output", ["text", "json"])
def test_a_reader_that_has_had_enough_is_no_error(output: str) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    example = "examples/configs/grpo_tiny.yaml"
    command = [sys.executable, "-m", "nemo_rl_offload.cli", "check", example, "--format", output]
    done = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True, cwd=PROJECT_ROOT, check=False)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (141, "")


def test_closed_output_ends_a_run_with_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [
        sys.executable,
        "-m",
        "nemo_rl_offload.cli",
        "run",
        "grpo",
        "--run-dir",
        str(tmp_path / "out"),
    ]
    monkeypatch.setenv("PYTHONPATH", str(PROJECT_ROOT), prepend=os.pathsep)
    done = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (2, "error: standard output was closed.\n")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("unbuffered", ["", pytest.param("1", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "arguments",
    [["check", "examples/configs/grpo_tiny.yaml"], ["run", "grpo", "--run-dir", "{out}"], ["doctor"]],
    ids=lambda arguments: arguments[0],
)
def test_full_output_is_one_message(
    arguments: list[str], unbuffered: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    given = [argument.format(out=tmp_path / "out") for argument in arguments]
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "nemo_rl_offload.cli", *given]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=PROJECT_ROOT, check=False)
    assert (done.returncode, done.stderr) == (2, "error: cannot write standard output: No space left on device.\n")


@pytest.mark.slow
def test_what_the_terminal_cannot_show_is_escaped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    monkeypatch.setenv("PYTHONPATH", str(PROJECT_ROOT), prepend=os.pathsep)
    path = tmp_path / "c\N{LATIN SMALL LETTER O WITH DIAERESIS}nfig.yaml"
    path.write_text("defaults: examples/configs/grpo_tiny.yaml\n")
    for arguments, words in ((["check", str(path)], r"c\xf6nfig.yaml: no problems"), (["doctor"], "python")):
        command = [sys.executable, "-m", "nemo_rl_offload.cli", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        assert words in done.stdout
        assert done.stdout.isascii()
