"""The byte-level tokenizer, loading with its traps, and prompts."""

import json
from pathlib import Path
from typing import Any
from unicodedata import normalize

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import Qwen2Config

from nemo_rl_offload.data.prompt_tokens import encode_prompt
from nemo_rl_offload.data.tokenizer import load_tokenizer, make_byte_tokenizer
from nemo_rl_offload.errors import DataError

CONFIG = "tokenizer_config.json"


def make_folder(folder: Path) -> Path:
    """A byte-level tokenizer beside a Qwen2 configuration, as in a model folder."""
    make_byte_tokenizer(folder)
    Qwen2Config(vocab_size=264, hidden_size=8, num_hidden_layers=1, num_attention_heads=1).save_pretrained(folder)
    return folder


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / CONFIG).read_text()) | changes
    (folder / CONFIG).write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_tokenizer(make_folder(tmp_path_factory.mktemp("bytes")))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The same without a model configuration beside it."""
    folder = tmp_path_factory.mktemp("plain")
    make_byte_tokenizer(folder)
    return load_tokenizer(folder)


@given(text=st.text().filter(lambda text: "<|" not in text))  # may spell a special token
@example("\uf900 e\u0301 \x00 \r\n  'll")
@settings(max_examples=100, deadline=None)
def test_tokens_are_the_bytes_and_decode_to_the_text(tokenizer: Any, plain: Any, text: str) -> None:
    for encoder, expected in ((plain, text), (tokenizer, normalize("NFC", text))):
        ids = encoder.encode(text)
        assert ids == list(expected.encode())
        assert encoder.decode(ids) == expected


def test_vocabulary_is_the_bytes_and_eight_special_tokens(tokenizer: Any) -> None:
    assert len(tokenizer) == 264
    assert tokenizer.encode("a<|endoftext|>") == [97, 257]
    special = (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id)
    assert special == (256, 257, 258)
    assert tokenizer.decode([97, *range(256, 264)], skip_special_tokens=True) == "a"


def test_files_are_reproducible(tmp_path: Path) -> None:
    for name in ("first", "second"):
        make_byte_tokenizer(tmp_path / name)
    for name in ("tokenizer.json", CONFIG):
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()


def test_a_tokenizer_that_encodes_to_nothing_is_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    (folder / "tokenizer.json").unlink()
    edit_config(folder, tokenizer_class="ByT5Tokenizer")
    with pytest.raises(DataError, match=r"to nothing.*tokenizer\.json"):
        load_tokenizer(folder)


def test_missing_folder_broken_file_and_missing_end_token_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no folder"):
        load_tokenizer(tmp_path / "nowhere")
    make_byte_tokenizer(tmp_path)
    edit_config(tmp_path, eos_token=None)
    with pytest.raises(DataError, match="no end token"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match="no tokenizer loads"):
        load_tokenizer(tmp_path)


def test_missing_padding_token_becomes_the_end_token(tmp_path: Path) -> None:
    make_byte_tokenizer(tmp_path)  # without a Qwen2 configuration beside it, whose class has one of its own
    edit_config(tmp_path, pad_token=None)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 256


def test_template_surrounds_the_stripped_question_and_keeps_other_braces(tokenizer: Any) -> None:
    ids = encode_prompt(tokenizer, "Answer in \\boxed{}: {question}\n", "  1 + {x}? ")
    assert tokenizer.decode(ids) == "Answer in \\boxed{}: 1 + {x}?\n"


def test_special_tokens_that_a_tokenizer_adds_open_the_prompt_and_never_close_it(tokenizer: Any) -> None:
    class AddsBoth:
        bos_token_id = tokenizer.bos_token_id

        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            ids = tokenizer.encode(text)
            return [258, *ids, 256] if add_special_tokens else ids

    assert encode_prompt(AddsBoth(), "{question}", "a") == [258, 97]
    assert encode_prompt(tokenizer, "{question}", "a") == [97]


def test_no_template_takes_the_chat_template_or_says_that_there_is_none(tmp_path: Path) -> None:
    edit_config(make_folder(tmp_path), chat_template=None)
    with pytest.raises(DataError, match=r"data\.prompt_template"):
        encode_prompt(load_tokenizer(tmp_path), None, "a")
    edit_config(tmp_path, chat_template="{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}\n")
    chatting = load_tokenizer(tmp_path)
    assert chatting.decode(encode_prompt(chatting, None, " a ")).startswith("<user>a")
    edit_config(tmp_path, chat_template="{{ raise_exception('no system') }}")
    with pytest.raises(
        DataError, match=r"policy\.tokenizer\.chat_template: the template refuses a question: no system"
    ):
        encode_prompt(load_tokenizer(tmp_path), None, "a")


@pytest.mark.parametrize("in_config", [False, True])
def test_code_beside_a_tokenizer_is_not_run_and_nobody_is_asked(
    in_config: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, asked = tmp_path / "own", []
    make_byte_tokenizer(folder)
    for name in ("mine.py", "configuration_mine.py"):
        (folder / name).write_text(f"open({str(tmp_path / 'canary')!r}, 'w')\nclass Mine:\n    pass\n")
    path = folder / "tokenizer_config.json"
    content = json.loads(path.read_text()) | {"auto_map": {"AutoTokenizer": ["mine.Mine", "mine.Mine"]}}
    path.write_text(json.dumps(content | {"tokenizer_class": "Mine"}))
    if in_config:
        Qwen2Config().save_pretrained(folder)
        config = json.loads((folder / "config.json").read_text()) | {"model_type": "mine"}
        config["auto_map"] = {"AutoConfig": "configuration_mine.Mine", "AutoTokenizer": ["mine.Mine", None]}
        (folder / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("builtins.input", lambda *words: asked.append(words) or "y")
    with pytest.raises(
        DataError, match=r"own': it needs code of its own \(auto_map\), which is never run\. Take one of"
    ):
        load_tokenizer(folder)
    assert asked == []
    assert not (tmp_path / "canary").exists()
