"""What is derived from schema and exemplars is fresh, and the commands of the documentation say what it shows."""

import re
import shlex
from pathlib import Path

import pytest

from nemo_rl_offload.cli import main
from nemo_rl_offload.config.loader import PROJECT_ROOT
from nemo_rl_offload.config.reference import DOCUMENT, REFERENCES, document, references

REGENERATE = "run: python -m nemo_rl_offload.config.reference"
SNIPPETS = re.findall(r"```\n\$ (.+)\n([^`]*)```", DOCUMENT.read_text())


def test_the_document_is_fresh() -> None:
    assert DOCUMENT.read_text() == document(), REGENERATE


def test_resolved_exemplars_are_fresh() -> None:
    expected = references()
    assert set(REFERENCES.glob("*.yaml")) == set(expected), REGENERATE
    for path, text in expected.items():
        assert path.read_text() == text, f"{path.name} has drifted; {REGENERATE}"


def test_the_document_has_every_key_once_and_its_default() -> None:
    text = document()
    assert text.count("\n| `min_offloaded_tensor_size` | a whole number from 0 | `1048576` | ") == 1
    assert text.count("\n| `seed` | a whole number from 0 | `10000000` | Seed of the problem generator") == 1
    assert "### `policy.megatron_cfg.cpu_affinity`\n" in text


@pytest.mark.parametrize(("command", "output"), SNIPPETS)
def test_commands_print_what_the_document_shows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str, output: str
) -> None:
    monkeypatch.chdir(PROJECT_ROOT)
    assert main(shlex.split(command)[1:]) == 2
    assert capsys.readouterr().err == output


def test_there_are_five_mistakes() -> None:
    assert len(SNIPPETS) == 5
    assert Path("examples/configs/grpo_tiny.yaml") in {Path(command.split()[4]) for command, _ in SNIPPETS}
