"""A run that is taken up again says which of its files changed, and what that means for it."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from nemo_rl_offload.config.loader import PROJECT_ROOT, load_config
from nemo_rl_offload.data.inputs import changed_beside_weights, changed_inputs, read_inputs_of
from nemo_rl_offload.data.records import files_of, read_records

GOES_ON = "The run keeps its place in the data and goes on there in what they are now: some may be learned twice, and"
NO_EFFECT = "That has no effect on this run: its weights come from its checkpoint."
REFERENCE = "The weights come from the checkpoint, but the reference model is read from these files again: from here on"
OVERRIDES = {
    "sft": (
        *("data.train.path=DIR/train.jsonl", "data.validation.path=DIR/valid.jsonl"),
        "policy.quant_cfg=quant.yaml",
    ),
    "dpo": (
        *("data.train.path=DIR/train.jsonl", "data.validation.path=DIR/valid.jsonl"),
        *("data.prompt_template=null", "policy.tokenizer.chat_template=template.jinja"),
    ),
    "grpo": (
        *("data.train.path=DIR/train.jsonl", "data.validation.path=DIR/valid.jsonl", "data.env_name=function"),
        *("env.function.path=scorer_of_a_test:score", "loss_fn.reference_policy_kl_penalty=0.1"),
    ),
    "distillation": ("teacher.model_name=DIR/teacher",),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With everything that runs read."""
    for name in ("train.jsonl", "valid.jsonl"):
        (tmp_path / name).write_text('{"question": "a", "answer": "b"}\n' * 3)
    for name in ("model", "teacher", "tokenizer"):
        shutil.copytree(PROJECT_ROOT / "examples/models/tiny_speller", tmp_path / name)
    (tmp_path / "model/generation_config.json").write_text('{"eos_token_id": 256}')
    (tmp_path / "quant.yaml").write_text("quant_cfg: []")
    (tmp_path / "template.jinja").write_text("{{ messages[0] }}")
    (tmp_path / "scorer_of_a_test.py").write_text("def score(messages, entry): return 1.0\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def configured(algorithm: str, folder: Path, *more: str) -> Any:
    paths = ("policy.model_name=DIR/model", "policy.tokenizer.name=DIR/tokenizer", *OVERRIDES[algorithm], *more)
    overrides = [text.replace("DIR", str(folder)) for text in paths]
    return load_config(PROJECT_ROOT / f"examples/configs/{algorithm}_tiny.yaml", overrides)


def edit(path: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / path).write_text(text) and None


def append(path: str) -> Callable[[Path], None]:
    return lambda folder: (folder / path).write_bytes((folder / path).read_bytes() + b"{}\n") and None


def change_key(path: str, key: str, value: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        content = json.loads((folder / path).read_text())
        (folder / path).write_text(json.dumps(content | {key: value}))

    return change


def flip(path: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        content = bytearray((folder / path).read_bytes())
        content[-1] ^= 1
        (folder / path).write_bytes(content)

    return change


def rewrite(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            path.unlink()
            path.write_bytes(content)
            os.utime(path, (1, 1))


def remove(path: str) -> Callable[[Path], None]:
    return lambda folder: (folder / path).unlink()


@pytest.mark.parametrize(
    ("algorithm", "change", "key", "told", "meaning"),
    [
        ("sft", edit("train.jsonl", "{}"), "data.train.path", "train.jsonl has other content (99 bytes", GOES_ON),
        ("sft", append("train.jsonl"), "data.train.path", "train.jsonl has 3 bytes more at its end.", GOES_ON),
        (
            "dpo",
            append("valid.jsonl"),
            "data.validation.path",
            "valid.jsonl has 3 bytes",
            "Validation before and after",
        ),
        ("grpo", edit("train.jsonl", "{}"), "data.train.path", "train.jsonl has other content", GOES_ON),
        (
            "sft",
            change_key("model/config.json", "rms_norm_eps", 0.5),
            "policy.model_name",
            "model/config.json says other things: rms_norm_eps was 1e-06, is 0.5.",
            "The checkpoint's weights go on in the model, and with the end tokens, that the files describe now.",
        ),
        (
            "grpo",
            change_key("model/generation_config.json", "eos_token_id", [256, 257]),
            "policy.model_name",
            "model/generation_config.json says other things: eos_token_id was 256, is [256, 257].",
            "The checkpoint's weights go on",
        ),
        ("sft", flip("model/model.safetensors"), "policy.model_name", "model/model.safetensors has other", NO_EFFECT),
        ("dpo", flip("model/model.safetensors"), "policy.model_name", "model/model.safetensors has other", REFERENCE),
        ("grpo", flip("model/model.safetensors"), "policy.model_name", "model/model.safetensors has other", REFERENCE),
        (
            "sft",
            change_key("tokenizer/tokenizer_config.json", "eos_token", "<|endoftext|>"),
            "policy.tokenizer.name",
            "tokenizer/tokenizer_config.json has other content",
            "From here on text is encoded, rendered and ended in their way, which is not what was trained.",
        ),
        (
            "sft",
            edit("tokenizer/chat_template.jinja", "{{ messages }}"),
            "policy.tokenizer.name",
            "tokenizer/chat_template.jinja is new.",
            "From here on text is",
        ),
        (
            "dpo",
            edit("template.jinja", "{{ messages }}"),
            "policy.tokenizer.chat_template",
            "template.jinja has other content",
            "From here on turns are rendered in its way.",
        ),
        (
            "grpo",
            edit("scorer_of_a_test.py", "def score(messages, entry): return 0.0\n"),
            "env.function.path",
            "scorer_of_a_test.py has other content",
            "From here on rewards come from the new source.",
        ),
        (
            "sft",
            edit("quant.yaml", "quant_cfg: [1]"),
            "policy.quant_cfg",
            "quant.yaml has other content",
            "From the next step on weights are quantized as it says now.",
        ),
        (
            "distillation",
            flip("teacher/model.safetensors"),
            "teacher.model_name",
            "teacher/model.safetensors has other content",
            "From here on the policy learns from this teacher.",
        ),
    ],
)
def test_each_change_is_one_line_that_names_the_file_and_what_it_means(
    algorithm: str, change: Callable[[Path], None], key: str, told: str, meaning: str, folder: Path
) -> None:
    config = configured(algorithm, folder)
    before = read_inputs_of(config)
    assert list(changed_inputs(config, before, read_inputs_of(config))) == []
    change(folder)
    (line,) = changed_inputs(config, before, read_inputs_of(config))
    assert line.startswith(f"{key}: changed since this run was last started: {folder}/{told}")
    assert meaning in line
    assert len(line.splitlines()) == 1


@pytest.mark.parametrize("algorithm", OVERRIDES)
def test_the_same_content_with_another_time_is_the_same(algorithm: str, folder: Path) -> None:
    config = configured(algorithm, folder)
    before = read_inputs_of(config)
    assert all(before.values())
    rewrite(folder)
    assert list(changed_inputs(config, before, read_inputs_of(config))) == []


@pytest.mark.parametrize(
    ("algorithm", "change"),
    [
        ("sft", flip("teacher/model.safetensors")),
        ("sft", edit("scorer_of_a_test.py", "x = 1\n")),
        ("sft", edit("model/README.md", "new")),
        ("sft", edit("model/tokenizer.json", "{}")),  # policy.tokenizer.name is another folder
        ("distillation", append("train.jsonl")),
    ],
)
def test_what_a_run_does_not_read_is_nothing_to_it(
    algorithm: str, change: Callable[[Path], None], folder: Path
) -> None:
    config = configured(algorithm, folder)
    before = read_inputs_of(config)
    change(folder)
    assert list(changed_inputs(config, before, read_inputs_of(config))) == []


def test_without_a_penalty_there_is_no_reference(folder: Path) -> None:
    config = configured("grpo", folder, "loss_fn.reference_policy_kl_penalty=0")
    before = read_inputs_of(config)
    flip("model/model.safetensors")(folder)
    (line,) = changed_inputs(config, before, read_inputs_of(config))
    assert line.endswith(NO_EFFECT)


def test_an_export_has_other_files_as_they_are_and_weights_of_its_checkpoint(folder: Path) -> None:
    config = configured("sft", folder)
    before = read_inputs_of(config)
    flip("model/model.safetensors")(folder)
    assert list(changed_beside_weights(config, before)) == []
    edit("tokenizer/tokenizer_config.json", "{}")(folder)
    (line,) = changed_beside_weights(config, before)
    assert line.startswith(f"policy.tokenizer.name: changed since the run was last started: {folder}/tokenizer")
    assert "The export has what they say now." in line


def test_a_run_may_move_with_its_files(folder: Path) -> None:
    before = read_inputs_of(configured("sft", folder))
    moved = shutil.copytree(folder, folder / "elsewhere", ignore=shutil.ignore_patterns("elsewhere"))
    config = configured("sft", moved)
    assert list(changed_inputs(config, before, read_inputs_of(config))) == []


def test_files_of_a_folder_are_those_that_are_read(tmp_path: Path, folder: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for name in ("a-00000-of-00002.jsonl", "a-00001-of-00002.jsonl", "b-00000-of-00001.jsonl", "README.md"):
        (data / name).write_text('{"question": "a", "answer": "b"}\n')
    config = configured("sft", folder, f"data.train.path={data}", "data.train.split=a")
    before = read_inputs_of(config)
    for name in ("b-00000-of-00001.jsonl", "README.md"):
        (data / name).unlink()
    assert list(changed_inputs(config, before, read_inputs_of(config))) == []
    remove("a-00001-of-00002.jsonl")(data)
    append("a-00000-of-00002.jsonl")(data)
    (line,) = changed_inputs(config, before, read_inputs_of(config))
    told = f"{data}/a-00000-of-00002.jsonl has 3 bytes more at its end, {data}/a-00001-of-00002.jsonl is gone."
    assert f"last started: {told} {GOES_ON}" in line


@pytest.mark.parametrize("is_dictionary", [False, True])
def test_files_of_a_saved_dataset(is_dictionary: bool, tmp_path: Path) -> None:
    path = tmp_path / "saved"
    Dataset.from_list([{"question": "a", "answer": "b"}]).save_to_disk(path / "train" if is_dictionary else path)
    if is_dictionary:
        (path / "dataset_dict.json").write_text('{"splits": ["train"]}')
    names = [file.name for file in files_of(path, "train")]
    assert names == ["state.json", "data-00000-of-00001.arrow"]
    assert [record.content for record in read_records(path, "train")] == [{"question": "a", "answer": "b"}]


def test_what_is_not_there_is_left_to_the_run(folder: Path) -> None:
    config = configured("sft", folder)
    before = read_inputs_of(config)
    shutil.rmtree(folder / "tokenizer")
    (folder / "train.jsonl").unlink()
    assert list(changed_inputs(config, before, read_inputs_of(config))) == []
