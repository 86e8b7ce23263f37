"""The shell's completion, asked in bash itself."""

import shlex
import shutil
import subprocess

import pytest

from nemo_rl_offload.cli import command_line
from nemo_rl_offload.cli.parser import EXAMPLES

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")


@pytest.fixture
def script(capsys: pytest.CaptureFixture[str]) -> str:
    assert command_line.main(["completion"]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("ru", ["run"]),
        ("run s", ["sft"]),
        ("run grpo --fo", ["--force", "--format"]),
        ("run grpo --format j", ["json"]),
        ("report a --se", ["--serve"]),
        ("export a b --dtype b", ["bfloat16"]),
        ("plan a.yaml --gpu h", ["h100-80gb", "h200-141gb"]),
        ("plan a.yaml --gpu = h", ["h100-80gb", "h200-141gb"]),
        ("plan a.yaml --la", ["--layouts"]),
        ("plan a.yaml --layouts policy.megatron_cfg.optimizer.l", ["policy.megatron_cfg.optimizer.lr="]),
        ("run grpo policy.megatron_cfg.optimizer.l", ["policy.megatron_cfg.optimizer.lr="]),
        ("check my.yaml logger.profile.s", ["logger.profile.steps="]),
        ("report policy.m", []),
        ("check exam", []),
    ],
)
def test_words_that_are_offered(line: str, offered: list[str], script: str) -> None:
    words = ["nemo-rl-offload", *line.split(" ")]
    asked = (
        f"{script}\nCOMP_WORDS=({shlex.join(words)}); COMP_CWORD={len(words) - 1}; _nemo_rl_offload 2>/dev/null; "
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    found = subprocess.run(["bash", "--norc", "-c", asked], capture_output=True, text=True, check=True).stdout.split()
    assert sorted(found) == sorted(offered)


def test_every_command_is_offered(script: str) -> None:
    asked = f"{script}\nCOMP_WORDS=(nemo-rl-offload ''); COMP_CWORD=1; _nemo_rl_offload; echo ${{COMPREPLY[@]}}"
    found = subprocess.run(["bash", "--norc", "-c", asked], capture_output=True, text=True, check=True).stdout.split()
    assert set(found) == set(EXAMPLES)
