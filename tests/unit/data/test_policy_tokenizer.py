"""The tokenizer of a run: its chat template with arguments, its end tokens, and the model that it is for."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_offload.data.policy_tokenizer import load_policy_tokenizer
from nemo_rl_offload.data.prompt_tokens import encode_prompt
from nemo_rl_offload.data.tokenizer import make_byte_tokenizer
from nemo_rl_offload.data.turns import ChatEncoder
from nemo_rl_offload.errors import ConfigError, DataError

CONVERSATION: Any = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
THINKING = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and quiet %}[quiet]{% endif %}"
    "{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if quiet %}[quiet]{% endif %}{% endif %}"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_byte_tokenizer(tmp_path)
    edit(tmp_path, "config", model_type="llama", vocab_size=264, num_hidden_layers=1, num_attention_heads=1)
    return tmp_path


def edit(folder: Path, name: str, **changes: Any) -> None:
    path = folder / f"{name}.json"
    content = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(content | changes))


def load(folder: Path, template: str | None = "default", **kwargs: Any) -> Any:
    section = {"name": str(folder), "chat_template": template, "chat_template_kwargs": kwargs or None}
    return load_policy_tokenizer({"model_name": str(folder), "tokenizer": section}, None)


def test_arguments_reach_the_template_wherever_it_is_rendered(folder: Path) -> None:
    edit(folder, "tokenizer_config", chat_template=THINKING)
    for kwargs, word in (({}, ""), ({"quiet": True}, "[quiet]")):
        tokenizer, end_ids = load(folder, **kwargs)
        assert tokenizer.decode(encode_prompt(tokenizer, None, "a")) == f"<user>a<|im_end|><assistant>{word}"
        row = ChatEncoder(tokenizer, None, end_ids)(CONVERSATION)
        assert tokenizer.decode(row.token_ids) == f"<user>a<|im_end|><assistant>{word}b<|im_end|>"


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ("default", "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"),
        ("{% for m in messages %}({{ m.content }}){% endfor %}", "(a)"),
        ("FILE", "[a]"),
        (None, "a"),
        ("other", "{a}"),
    ],
)
def test_the_setting_chooses_the_template(folder: Path, setting: str | None, text: str) -> None:
    own = json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
    other = "{% for m in messages %}{{ '{' + m.content + '}' }}{% endfor %}"
    named = [{"name": "default", "template": own}, {"name": "other", "template": other}]
    edit(folder, "tokenizer_config", chat_template=named)
    (folder / "mine.jinja").write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    tokenizer, _ = load(folder, str(folder / "mine.jinja") if setting == "FILE" else setting)
    assert tokenizer.decode(encode_prompt(tokenizer, None, "a")) == text
    with pytest.raises(ConfigError, match=r"policy\.tokenizer\.chat_template: 'otter' is no .*Did you mean 'other'"):
        load(folder, "otter")


def test_all_end_tokens_of_a_run(folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # what files say, the check of the configuration warns of
        assert load(folder)[1] == (256,)
        edit(folder, "generation_config", eos_token_id=[257, 256])
        assert load(folder)[1] == (256, 257)
        edit(folder, "tokenizer_config", chat_template="{% for m in messages %}{{ m.content }}<|bos|>{% endfor %}")
        assert load(folder)[1] == (256, 258, 257)


def test_a_disagreement_that_files_do_not_tell_is_warned_of(folder: Path) -> None:
    content = json.loads((folder / "tokenizer_config.json").read_text())
    del content["eos_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(content | {"tokenizer_class": "GPT2Tokenizer"}))
    edit(folder, "generation_config", eos_token_id=256)
    with pytest.warns(
        UserWarning, match=r"eos_token is <\|endoftext\|> \(257\), generation_config.json has \[<\|im_end\|>"
    ):
        assert load(folder)[1] == (257, 256)


def test_a_model_without_all_tokens_of_the_tokenizer_is_refused(folder: Path) -> None:
    edit(folder, "config", vocab_size=263)
    with pytest.raises(DataError, match=r"ids up to 263, and the model in .* has 263 tokens .*Take the model's own"):
        load(folder)
    edit(folder, "config", vocab_size=1000)
    load(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": {"vocab_size": 263}}))
    with pytest.raises(DataError, match=r"has 263 tokens \(text_config\.vocab_size of its config\.json\)"):
        load(folder)
