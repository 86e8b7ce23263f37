"""What an export says about itself, read as its users read it."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from nemo_rl_offload.config.loader import PROJECT_ROOT
from nemo_rl_offload.data.tokenizer import CHAT_TEMPLATE, load_tokenizer, make_byte_tokenizer
from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.megatron.build import export_files
from nemo_rl_offload.megatron.build.model import convert, most_common_dtype

MODEL = PROJECT_ROOT / "examples/models/tiny_speller"
HELLO = [{"role": "user", "content": "hi"}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With the files of a model beside the weights."""
    out = tmp_path / "out"
    out.mkdir()
    export_files.copy_model_files(MODEL, out)
    return out


def test_exported_weights_are_not_quantized(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": {"quant_method": "fp8"}}))
    export_files.write_dtype(folder, "bfloat16")
    assert "quantization_config" not in json.loads(path.read_text())


@pytest.mark.parametrize(
    "keys",
    [
        {"dtype": "float32"},
        {"torch_dtype": "float32"},
        {"dtype": "float32", "torch_dtype": "float16"},
        {},
        {"text_config": {"torch_dtype": "float32"}},
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_type_of_the_weights_is_said_where_readers_look(
    keys: dict[str, Any], dtype: torch.dtype, folder: Path
) -> None:
    config = json.loads((folder / "config.json").read_text())
    rest = {key: value for key, value in config.items() if key not in ("dtype", "torch_dtype")}
    (folder / "config.json").write_text(json.dumps(rest | keys))
    export_files.write_dtype(folder, str(dtype).removeprefix("torch."))
    found = json.loads((folder / "config.json").read_text())
    types = ("dtype", "torch_dtype", "text_config")
    assert {key: found[key] for key in found if key not in types} == rest
    assert {found[key] for key in ("dtype", "torch_dtype") if key in found} == {str(dtype).removeprefix("torch.")}
    assert AutoConfig.from_pretrained(folder).dtype == dtype
    if "text_config" in keys:
        assert found["text_config"] == {"torch_dtype": str(dtype).removeprefix("torch.")}


@pytest.mark.parametrize(("ids", "written"), [([256], 256), ([256, 260], [256, 260])])
@pytest.mark.parametrize("before", [None, {"eos_token_id": 3, "temperature": 0.6, "do_sample": True}])
def test_generation_stops_where_the_run_stopped(
    ids: list[int], written: object, before: dict[str, Any] | None, folder: Path
) -> None:
    path = folder / "generation_config.json"
    path.unlink(missing_ok=True)
    if before is not None:
        path.write_text(json.dumps(before | {"_from_model_config": True}))
    export_files.write_generation_config(folder, ids, 257)
    assert json.loads(path.read_text()) == {**(before or {}), "eos_token_id": written, "pad_token_id": 257}
    assert GenerationConfig.from_pretrained(folder).eos_token_id == written


def test_a_broken_generation_config_is_named(folder: Path) -> None:
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"generation_config\.json cannot be read: .*Mend it\."):
        export_files.write_generation_config(folder, [1], 2)


def read_only(folder: Path) -> Path:
    """As the files of a cache often are."""
    for path in folder.iterdir():
        path.chmod(0o444)
    return folder


def test_files_can_be_written_over_though_their_source_cannot(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    shutil.copytree(MODEL, source)
    out.mkdir()
    export_files.copy_model_files(read_only(source), out)
    export_files.replace_tokenizer(out, source)
    assert {"config.json", "tokenizer.json"} <= {path.name for path in out.iterdir()}
    assert all(os.stat(path).st_mode & 0o200 for path in out.iterdir())


def test_the_runs_tokenizer_replaces_all_of_the_models(folder: Path, tmp_path: Path) -> None:
    strangers = {"vocab.json": "{}", "merges.txt": "", "added_tokens.json": '{"<|new|>": 300}', "spiece.model": ""}
    strangers |= {"special_tokens_map.json": '{"eos_token": "<|endoftext|>"}', "chat_template.jinja": "model's"}
    for name, text in strangers.items():
        (folder / name).write_text(text)
    own = tmp_path / "own"
    make_byte_tokenizer(own)
    (own / "additional_chat_templates").mkdir()
    (own / "additional_chat_templates/tools.jinja").write_text("with tools")
    template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{{ eos_token }}{% endfor %}"
    (own / "chat_template.jinja").write_text(template)
    export_files.replace_tokenizer(folder, own)
    assert {path.name for path in folder.iterdir()} & strangers.keys() == {"chat_template.jinja"}
    assert (folder / "additional_chat_templates/tools.jinja").read_text() == "with tools"
    exported, trained = AutoTokenizer.from_pretrained(folder), load_tokenizer(own)
    assert exported.get_vocab() == trained.get_vocab()
    assert exported.apply_chat_template(HELLO, tokenize=False) == "<user>hi<|im_end|>"


@pytest.mark.parametrize("own", ["in the configuration", "a file", "named ones", "none"])
def test_the_chat_template_of_the_run_is_the_only_one(own: str, folder: Path) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template")
    if own == "in the configuration":
        config["chat_template"] = CHAT_TEMPLATE
    elif own == "named ones":
        config["chat_template"] = [{"name": "default", "template": "a"}, {"name": "tools", "template": "b"}]
    elif own == "a file":
        (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    template = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
    export_files.write_chat_template(folder, template)
    exported = AutoTokenizer.from_pretrained(folder)
    assert exported.apply_chat_template(HELLO, tokenize=False) == "[user] hi\n"
    assert json.loads((folder / "tokenizer_config.json").read_text())["chat_template"] == template  # for older readers


def _more_tokens(config: dict[str, Any]) -> None:
    config["extra_special_tokens"] = ["<|more|>"]


def _other_end(config: dict[str, Any]) -> None:
    config["eos_token"] = "<|endoftext|>"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda _config: None, ""),
        (_more_tokens, "it has 265 tokens instead of 264"),
        (_other_end, "its end token is <|endoftext|> instead of <|im_end|>"),
    ],
)
def test_a_tokenizer_that_reads_otherwise_is_told(
    change: Callable[[dict[str, Any]], None], expected: str, tmp_path: Path
) -> None:
    for name in ("trained", "exported"):
        make_byte_tokenizer(tmp_path / name)
    path = tmp_path / "exported/tokenizer_config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))
    found = export_files.difference(load_tokenizer(tmp_path / "exported"), load_tokenizer(tmp_path / "trained"))
    assert found.startswith(expected)
    assert bool(found) == bool(expected)


def test_another_class_beside_the_models_configuration_is_told(folder: Path, tmp_path: Path) -> None:
    make_byte_tokenizer(tmp_path / "trained")
    trained = load_tokenizer(tmp_path / "trained")
    found = export_files.difference(load_tokenizer(folder), trained)
    assert found.startswith("as Qwen2Tokenizer, it encodes 'e\u0301 ")


def test_weights_are_converted_but_for_those_kept_exact() -> None:
    weights = {
        "matrix": torch.ones(8, 8, dtype=torch.bfloat16),
        "correction": torch.tensor([1.0, 1e-9], dtype=torch.float32),
        "counts": torch.tensor([3]),
    }
    assert most_common_dtype(weights) == torch.bfloat16
    half = dict(weights)
    convert(half, torch.float16)
    assert [weight.dtype for weight in half.values()] == [torch.float16, torch.float32, torch.int64]
    single = dict(weights)
    convert(single, torch.float32)
    assert [weight.dtype for weight in single.values()] == [torch.float32, torch.float32, torch.int64]
    assert torch.equal(single["matrix"].bfloat16(), weights["matrix"])
    assert most_common_dtype(single) == torch.float32


def test_a_weight_too_large_for_a_type_is_refused_and_an_infinite_one_is_not() -> None:
    large = {"layers.0.weight": torch.full((2, 2), 7e4, dtype=torch.bfloat16)}
    with pytest.raises(ConfigError, match=r"--dtype float16: 7\.01e\+04 in layers\.0\.weight is too large for it"):
        convert(large, torch.float16)
    convert({"mask": torch.tensor([float("-inf")])}, torch.float16)
