"""Output that cannot be written, or not as it is: one message, and no traceback."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_rl_offload.config.loader import PROJECT_ROOT


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "code", "error"),
    [
        (["check", "examples/configs/grpo_tiny.yaml"], 141, ""),
        (["check", "examples/configs/grpo_tiny.yaml", "--format", "json"], 141, ""),
        (["doctor", "a=1", "--format", "json"], 2, "error: doctor takes no configuration: a=1\n"),
    ],
)
def test_a_reader_that_has_had_enough_is_no_error(words: list[str], code: int, error: str) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "nemo_rl_offload.cli", *words]
    done = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True, cwd=PROJECT_ROOT, check=False)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (code, error)


OUTLIVES = """
import sys
from nemo_rl_offload.cli.outlive import outliving_readers
with outliving_readers():
    for step in range(3):
        print("step", step)
        print("note", step, file=sys.stderr)
open(sys.argv[1], "w").write("done")
"""


@pytest.mark.parametrize("both", [False, True], ids=["output", "output and errors"])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_job_goes_on_without_its_reader(
    both: bool, unbuffered: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(PROJECT_ROOT), prepend=os.pathsep)
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-c", OUTLIVES, str(tmp_path / "done")]
    errors = subprocess.STDOUT if both else subprocess.PIPE
    done = subprocess.run(command, stdout=write_end, stderr=errors, text=True, check=False)
    os.close(write_end)
    assert (done.returncode, (tmp_path / "done").read_text()) == (0, "done")
    assert both or done.stderr.splitlines() == ["note 0", "note 1", "note 2"]


@pytest.mark.sampled
@pytest.mark.slow
def test_a_run_goes_on_without_its_reader(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    few = ("sft.max_num_steps=1", "sft.val_period=0", "sft.val_at_start=false")
    example = "examples/configs/sft_tiny.yaml"
    command = [sys.executable, "-m", "nemo_rl_offload.cli", "run", "sft", "--config", example]
    done = subprocess.run(
        [*command, "--run-dir", str(tmp_path / "out"), *few],
        stdout=write_end,
        stderr=subprocess.STDOUT,
        cwd=PROJECT_ROOT,
        check=False,
    )
    os.close(write_end)
    assert done.returncode == 0
    assert (tmp_path / "out" / "summary.json").exists()


@pytest.mark.slow
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
