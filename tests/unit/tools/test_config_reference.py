"""What is derived from schema and exemplars is fresh, and the commands of the documentation say what it shows."""

import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from config_reference import DOCUMENT, REFERENCES, base, document, references

from nemo_rl_offload.cli.command_line import main
from nemo_rl_offload.config.loader import BASE, PROJECT_ROOT, load_config
from nemo_rl_offload.config.schema import MasterConfig
from nemo_rl_offload.config.types import defaults_of

REGENERATE = "run: python tools/config_reference.py"
SNIPPETS = re.findall(r"```\n\$ (.+)\n([^`]*)```", DOCUMENT.read_text())
MY_YAML = re.findall(r"```yaml\n(defaults:[^`]*)```", DOCUMENT.read_text())[0]


def test_the_file_of_defaults_is_fresh() -> None:
    assert BASE.read_text() == base(), REGENERATE


def test_the_file_of_defaults_says_what_the_schema_does() -> None:
    assert yaml.safe_load(base()) == defaults_of(MasterConfig)


def test_every_value_of_the_file_of_defaults_is_explained() -> None:
    lines = base().splitlines()
    pairs = [(above, line) for above, line in pairwise(lines) if re.match(r"\s*\w+:", line)]
    assert len(pairs) > 230
    assert [line for above, line in pairs if "  # " not in line and not above.lstrip().startswith("# ")] == []
    assert max(map(len, lines)) <= 120


def test_the_document_is_fresh() -> None:
    assert DOCUMENT.read_text() == document(), REGENERATE


def test_what_exemplars_change_is_fresh() -> None:
    expected = references()
    assert set(REFERENCES.glob("*.yaml")) == set(expected), REGENERATE
    for path, text in expected.items():
        assert path.read_text() == text, f"{path.name} has drifted; {REGENERATE}"


def test_an_exemplar_is_the_defaults_and_what_it_changes() -> None:
    changes = yaml.safe_load(references()[REFERENCES / "grpo_math_1B.yaml"])
    exemplar = load_config(BASE.parent / "grpo_math_1B.yaml")
    assert changes["policy"]["model_name"] == exemplar["policy"]["model_name"]
    assert changes["policy"]["dynamic_batching"]["train_mb_tokens"] == (
        exemplar["policy"]["max_total_sequence_length"] * exemplar["policy"]["train_micro_batch_size"]
    )
    assert "moe_paged_stash_page_size" not in changes["policy"]["megatron_cfg"]


def test_the_document_has_every_key_once_and_its_default() -> None:
    text = document()
    assert text.count("\n| `min_offloaded_tensor_size` | a whole number from 0 | `1048576` | ") == 1
    assert (
        text.count("\n| `seed` | a whole number from 0 below 4294967296 | `10000000` | Seed of that choice, and of ")
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
