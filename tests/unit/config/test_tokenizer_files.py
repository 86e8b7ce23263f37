"""What the files of a tokenizer say, and which chat template a setting asks for."""

import json
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_offload.config.loader import PROJECT_ROOT
from nemo_rl_offload.config.tokenizer_files import chosen_template, differing_token, read_tokenizer_files
from nemo_rl_offload.data.tokenizer import load_tokenizer
from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.specs.chat_template import PASSTHROUGH


def write(folder: Path, config: dict[str, Any], **files: Any) -> Path:
    for name, content in {"tokenizer_config": config, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


ADDED = [{"id": 3, "content": "</s>"}, {"id": 9, "content": "<pad>"}]


def test_tokens_of_their_own_and_the_highest_id(tmp_path: Path) -> None:
    vocabulary = {"model": {"vocab": {"a": 0, "b": 4}}, "added_tokens": ADDED}
    files = read_tokenizer_files(write(tmp_path, {"eos_token": {"content": "</s>"}}, tokenizer=vocabulary))
    assert (files.eos_id, files.highest_id, files.ids) == (3, 9, {"</s>": 3, "<pad>": 9})


def test_the_vocabulary_is_that_of_the_loaded_tokenizer() -> None:
    folder = PROJECT_ROOT / "examples/models/tiny_speller"
    assert read_tokenizer_files(folder).vocabulary == load_tokenizer(folder).get_vocab()


@pytest.mark.parametrize(
    ("vocabulary", "token"),
    [
        ({"a": 0, "b": 4}, None),
        ({"a": 0, "b": 4, "c": 5}, "c"),
        ({"a": 0}, "b"),
        ({"a": 4, "b": 0}, "a"),
        ({"a": 0, "b": 4, "<eos>": 7}, None),  # which a tokenizer without it adds when it is loaded
    ],
)
def test_differing_tokens(tmp_path: Path, vocabulary: dict[str, int], token: str | None) -> None:
    folders = tmp_path / "a", tmp_path / "b"
    for folder, vocab in zip(folders, ({"a": 0, "b": 4}, vocabulary), strict=True):
        folder.mkdir()
        write(folder, {"eos_token": "<eos>"}, tokenizer={"model": {"vocab": vocab}, "added_tokens": ADDED})
    some, other = map(read_tokenizer_files, folders)
    assert differing_token(some, other) == differing_token(other, some) == token
    (folders[1] / "tokenizer.json").unlink()
    assert differing_token(some, read_tokenizer_files(folders[1])) is None


def test_a_list_of_pieces_and_other_places_of_special_tokens(tmp_path: Path) -> None:
    pieces = {"model": {"vocab": [["a", 0.0]] * 12}}
    config = {"added_tokens_decoder": {"3": {"content": "</s>"}}, "model_max_length": 5}
    files = read_tokenizer_files(write(tmp_path, config, tokenizer=pieces, special_tokens_map={"eos_token": "</s>"}))
    assert (files.eos_id, files.highest_id) == (3, 11)


def test_a_tokenizer_of_other_files_says_less(tmp_path: Path) -> None:
    files = read_tokenizer_files(write(tmp_path, {"eos_token": "</s>"}))
    assert (files.eos_id, files.highest_id, files.templates) == (None, None, {})


def test_chat_templates_by_name(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "a"}, {"name": "rag", "template": "b"}]
    assert read_tokenizer_files(write(tmp_path, {"chat_template": named})).templates == {"default": "a", "rag": "b"}
    (tmp_path / "chat_template.jinja").write_text("c")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("d")
    templates = read_tokenizer_files(write(tmp_path, {"chat_template": "a", "x": 1})).templates
    assert templates == {"default": "c", "tool_use": "d"}


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"chat_template": [{"name": "a"}]}', '{"added_tokens_decoder": {"x": {"content": "a"}}}']
)
def test_broken_files_are_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"the tokenizer's files in '.*' cannot be read: .*Mend them"):
        read_tokenizer_files(tmp_path)


@pytest.mark.parametrize("vocab", ["[[], []]", "[5]", '{"a": "1", "b": 2}', '{"a": 1.5}', "[[[], 1]]"])
def test_a_vocabulary_without_numbers_is_refused(tmp_path: Path, vocab: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text(f'{{"model": {{"vocab": {vocab}}}}}')
    with pytest.raises(ConfigError, match=r"the tokenizer's files in '.*' cannot be read: .*Mend them"):
        read_tokenizer_files(tmp_path)


def test_a_setting_is_a_name_a_text_or_a_file(tmp_path: Path) -> None:
    own = {"default": "a", "rag": "b"}
    (tmp_path / "mine.jinja").write_text("{{ messages }}")
    for setting, template in (
        ("default", "a"),
        ("Default", "a"),
        ("rag", "b"),
        ("{{ messages[0].content }}", "{{ messages[0].content }}"),
        ("{% for m in messages %}x{% endfor %}", "{% for m in messages %}x{% endfor %}"),
        (str(tmp_path / "mine.jinja"), "{{ messages }}"),
        (None, PASSTHROUGH),
    ):
        assert chosen_template(setting, own) == template
    assert chosen_template("default", {}) is None
    for setting in ("defualt", "", str(tmp_path), str(tmp_path / "other.jinja")):
        with pytest.raises(
            ConfigError, match=r"no Jinja text, none of the tokenizer's templates \(default, rag\) and no"
        ):
            chosen_template(setting, own)
    with pytest.raises(ConfigError, match="Did you mean 'default'"):
        chosen_template("defualt", own)
