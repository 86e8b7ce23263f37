"""What is derived from schema and exemplars is fresh, and the commands of the documentation say what it shows."""

import re
import shlex
from pathlib import Path

import pytest
from config_reference import DOCUMENT, REFERENCES, document, references

from nemo_rl_offload.cli.command_line import main
from nemo_rl_offload.config.loader import PROJECT_ROOT

REGENERATE = "run: python tools/config_reference.py"
SNIPPETS = re.findall(r"```\n\$ (.+)\n([^`]*)```", DOCUMENT.read_text())
MY_YAML = re.findall(r"```yaml\n(defaults:[^`]*)```", DOCUMENT.read_text())[0]


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
    assert (
        text.count("\n| `seed` | a whole number from 0 below 4294967296 | `10000000` | Seed of the problem generator")
        == 1
    )
    assert "### `policy.megatron_cfg.cpu_affinity`\n" in text


@pytest.mark.parametrize(("command", "output"), SNIPPETS)
def test_commands_print_what_the_document_shows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str, output: str
) -> None:
    (tmp_path / "examples").symlink_to(PROJECT_ROOT / "examples")
    (tmp_path / "my.yaml").write_text(MY_YAML)
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(command)[1:]) == 2
    assert capsys.readouterr().err == output


def test_there_are_five_mistakes() -> None:
    assert len(SNIPPETS) == 5
    assert {command.split()[1] for command, _ in SNIPPETS} == {"check"}
