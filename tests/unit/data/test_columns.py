"""Records whose keys are named, data sets of the hub by name, and texts around prompts."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_offload.algorithms.rollout_loop import num_steps
from nemo_rl_offload.config.loader import PROJECT_ROOT, load_config, resolve_data_path, resolve_model_path
from nemo_rl_offload.config.recipe import read_recipe
from nemo_rl_offload.config.schema import TrainingDataConfig
from nemo_rl_offload.config.types import defaults_of
from nemo_rl_offload.config.validation import check_config
from nemo_rl_offload.data.columns import records_of, split_off, text_around, training_records, validation_records
from nemo_rl_offload.data.inputs import _sources
from nemo_rl_offload.data.prompts import prompt_data, prompt_sets
from nemo_rl_offload.data.records import Record
from nemo_rl_offload.data.samples import sample_sets
from nemo_rl_offload.data.tokenizer import load_tokenizer
from nemo_rl_offload.errors import ConfigError, DataError
from nemo_rl_offload.specs.data_sets import DATA_SETS

MODEL = PROJECT_ROOT / "examples" / "models" / "tiny_speller"
RECORDS: dict[str, list[dict[str, Any]]] = {
    "OpenMathInstruct-2": [
        {"problem": f"{n}+1?", "generated_solution": f"It is {n + 1}.", "expected_answer": str(n + 1)}
        for n in range(40)
    ],
    "DeepScaler": [{"problem": "2+2?", "answer": "4", "solution": "..."}],
    "DAPOMath17K": [{"prompt": [{"role": "user", "content": "2+2?"}], "reward_model": {"ground_truth": "4"}}],
    "DAPOMathAIME2024": [{"prompt": [{"role": "user", "content": "2+2?"}], "reward_model": {"ground_truth": "4"}}],
    "AIME2024": [{"problem": "2+2?", "answer": 4}],
    "math500": [{"problem": "2+2?", "answer": "4", "solution": "..."}],
    "AIME2026": [{"problem": "2+2?", "answer": 4}],
    "OpenR1-Math-220k": [{"problem": "2+2?", "answer": "4"}],
    "gsm8k": [{"question": "2+2?", "answer": "Two and two\n#### 4"}],
    "GSM8K": [{"question": "2+2?", "answer": "Two and two\n#### 4"}],
}
"""A few records of data sets of problems, in the columns that the hub's have."""


def download(hub: Path, name: str, records: list[dict[str, Any]], kind: str = "dataset") -> Path:
    """Put records where the hub's client would; returns the snapshot's folder."""
    owner, repository, *inner = DATA_SETS[name].hub_id.split("/")
    folder = hub / f"{kind}s--{owner}--{repository}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    snapshot = folder / "snapshots" / "abc"
    data = snapshot.joinpath(*inner) if inner else snapshot / "data"
    data.mkdir(parents=True)
    blob = folder / "blob"
    blob.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    (data / f"{DATA_SETS[name].split or 'train'}-00000-of-00001.jsonl").symlink_to(blob)
    return snapshot


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


@pytest.fixture
def recipe(tmp_path: Path) -> Callable[..., Any]:
    """A configuration in NeMo-RL's words for data, checked for a run here."""

    def make(text: str, *overrides: str, algorithm: str = "grpo") -> Any:
        path = tmp_path / "recipe.yaml"
        base = PROJECT_ROOT / f"examples/configs/{algorithm}_tiny.yaml"
        path.write_text(f"defaults: {base}\n{text}")
        return check_config(read_recipe(path, overrides)).config

    return make


@pytest.mark.parametrize("name", RECORDS)
def test_problems_of_the_hub_by_name(name: str, hub: Path, recipe: Callable[..., Any]) -> None:
    download(hub, name, RECORDS[name] * 2)
    data = f"data: {{env_name: math, train: {{dataset_name: {name}}}, validation: {{dataset_name: {name}, repeat: 3}}}}"
    config = recipe(data)
    train = records_of(config["data"]["train"], "data.train", "answer")
    assert {(r.content["prompt"], r.content["answer"]) for r in train[:1]} <= {("2+2?", "4"), ("0+1?", "1")}  # type: ignore[index]
    validation = records_of(config["data"]["validation"], "data.validation", "answer")
    assert len(validation) == 3 * 2 * len(RECORDS[name])


def test_other_columns_and_a_part_for_validation(hub: Path, recipe: Callable[..., Any]) -> None:
    download(hub, "OpenMathInstruct-2", RECORDS["OpenMathInstruct-2"])
    text = (
        "data: {train: {dataset_name: OpenMathInstruct-2, output_key: generated_solution, seed: 7}, validation: null}"
    )
    config = recipe(text, "policy.train_global_batch_size=8", "policy.train_micro_batch_size=8", algorithm="sft")
    assert config["data"]["train"]["split_validation_size"] == 0.05
    stream, validation, counts = sample_sets(config, load_tokenizer(MODEL), [0], seed=1)
    assert (counts["data.train"].num_samples, len(validation), stream.num_batches) == (38, 2, 4)
    text = load_tokenizer(MODEL).decode(validation[0][0].token_ids)
    assert "It is" in text


def test_what_is_not_downloaded_is_told_with_the_command(hub: Path, recipe: Callable[..., Any]) -> None:
    with pytest.raises(
        ConfigError,
        match=r"data.train.path: 'openai/gsm8k' is not downloaded .* `hf download openai/gsm8k --repo-type dataset`",
    ):
        recipe("data: {env_name: math, train: {dataset_name: gsm8k}, validation: {dataset_name: gsm8k}}")
    with pytest.raises(ConfigError, match=r"a data set of this name, not supported here.*Did you mean 'DeepScaler'"):
        recipe("data: {env_name: math, train: {dataset_name: DeepScale}}")
    with pytest.raises(ConfigError, match=r"downloads in .*hub\)\. .*`hf download a/b`"):
        resolve_model_path("a/b")
    download(hub, "gsm8k", RECORDS["gsm8k"])
    with pytest.raises(ConfigError, match="has no other in"):
        resolve_data_path("hf://datasets/openai/gsm8k/other")


def test_a_model_of_the_hub_that_is_downloaded(hub: Path) -> None:
    snapshot = hub / "models--a--b" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (hub / "models--a--b" / "refs").mkdir()
    (hub / "models--a--b" / "refs" / "main").write_text("abc\n")
    (snapshot / "config.json").write_text("{}")
    assert resolve_model_path("a/b") == snapshot


@pytest.mark.parametrize(
    ("size", "num"), [(0.05, 1), (0.5, 5), (1, 1), (3.0, 3)], ids=["share", "half", "one", "number"]
)
def test_split_off(size: float, num: int) -> None:
    records = [Record(str(place), {}) for place in range(10)]
    train, validation = split_off(records, size, seed=3)
    assert (len(train), len(validation)) == (10 - num, num)
    assert sorted([*train, *validation], key=lambda record: int(record.place)) == records
    assert split_off(records, size, seed=3) == (train, validation)
    with pytest.raises(DataError, match="leaves none to train on"):
        split_off(records, 10, seed=3)
    with pytest.raises(DataError, match=r"^data\.train\.path: the data set is empty\. Give one with records\.$"):
        split_off([], size, seed=3)


def numbered(path: Path, name: str, num: int) -> Path:
    path.write_text("".join(json.dumps({"prompt": f"{name}{n}?", "answer": str(n)}) + "\n" for n in range(num)))
    return path


def test_several_data_sets_are_read_one_after_the_other(tmp_path: Path, recipe: Callable[..., Any]) -> None:
    a, b = (numbered(tmp_path / f"{name}.jsonl", name, 10) for name in "ab")
    config = recipe(
        f"""
data:
  env_name: math
  train:
    - {{path: {a}, split_validation_size: 3, seed: 1}}
    - {{path: {b}, max_samples: 4, split_validation_size: 0.25, seed: 2}}
  validation:
    - {{path: {a}, max_samples: 2, repeat: 3}}
    - {{path: {b}, max_samples: 100}}
"""
    )
    data = config["data"]
    kept, drawn = training_records(data["train"], "answer")
    assert [str(r.content["prompt"])[0] for r in kept] == [*"a" * 7, *"b" * 3]  # type: ignore[index]
    assert [str(r.content["prompt"])[0] for r in drawn] == [*"aaa", "b"]  # type: ignore[index]
    assert len({record.place for record in [*kept, *drawn]}) == 14
    assert training_records(data["train"], "answer") == (kept, drawn)
    held = validation_records(data["validation"], "answer")
    assert len(held) == 2 * 3 + 10
    assert len({record.place for record in held[:6]}) == 2
    stream, validation = prompt_sets(data, config["env"]["reasoning_gym"], load_tokenizer(MODEL), seed=1)
    assert (stream.num_problems, len(validation)) == (10, 4 + 16)
    assert {each.key for each in _sources(config)} >= {
        "data.train.path",
        "data.train.further.0.path",
        "data.validation.further.0.path",
    }


def test_a_data_set_of_a_list_that_is_not_there_is_named(tmp_path: Path, recipe: Callable[..., Any]) -> None:
    a = numbered(tmp_path / "a.jsonl", "a", 3)
    text = f"data: {{env_name: math, train: [{{path: {a}}}, {{path: {tmp_path}/c.jsonl}}], validation: {{path: {a}}}}}"
    with pytest.raises(ConfigError, match=r"data.train.further.0.path: .*c.jsonl"):
        recipe(text)


def test_records_are_drawn_by_the_seed(tmp_path: Path) -> None:
    path = str(numbered(tmp_path / "a.jsonl", "a", 50))
    section: Any = {"path": path, "split": None, "input_key": None, "output_key": None, "max_samples": 5, "seed": 1}
    first, again, other = (records_of({**section, "seed": seed}, "data.train", "answer") for seed in (1, 1, 2))
    assert first == again != other
    assert len({record.place for record in first}) == 5
    assert len(records_of({**section, "max_samples": None}, "data.train", "answer")) == 50


def test_a_record_without_the_named_key_is_bad(tmp_path: Path, recipe: Callable[..., Any]) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"ask": "2+2?", "said": "4"}\n{"ask": "2+2?"}\n')
    text = f"data: {{env_name: math, train: {{dataset_name: ResponseDataset, data_path: {file}, input_key: ask, output_key: said}}}}"  # noqa: E501
    config = recipe(text, "grpo.val_period=0", "grpo.val_at_start=false", "grpo.val_at_end=false")
    records = records_of(config["data"]["train"], "data.train", "answer")
    assert [record.content for record in records] == [
        {"prompt": "2+2?", "answer": "4"},
        "has nothing under said (data.train.output_key); it has ask",
    ]


@pytest.mark.parametrize(
    ("given", "content"),
    [
        ({"output_key": "said"}, {"prompt": "2+2?", "completion": "4"}),
        ({"input_key": "ask"}, "has nothing under completion, and data.train.output_key names no column; it has"),
        ({"input_key": "ask", "output_key": "said"}, {"prompt": "3+1?", "completion": "4"}),
    ],
)
def test_one_named_key_leaves_the_other_column_alone(
    given: dict[str, str], content: object, tmp_path: Path, recipe: Callable[..., Any]
) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt": "2+2?", "said": "4", "ask": "3+1?"}\n')
    text = f"data: {{env_name: math, train: {{dataset_name: ResponseDataset, data_path: {file}}}}}"
    section = recipe(text, "grpo.val_period=0", "grpo.val_at_start=false", "grpo.val_at_end=false")["data"]["train"]
    (record,) = records_of({**section, "input_key": None, "output_key": None, **given}, "data.train", "completion")
    if isinstance(content, str):
        assert str(record.content).startswith(content)
    else:
        assert record.content == content


def test_named_columns_leave_what_is_said_beside_turns(tmp_path: Path, recipe: Callable[..., Any]) -> None:
    beside = {"system": "S", "tools": [], "label": False, "weight": 0, "functions": ["f"], "images": ["i"]}
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"ask": "2+2?", "said": "4", "other": "x", **beside}) + "\n")
    text = f"data: {{env_name: math, train: {{dataset_name: ResponseDataset, data_path: {file}}}}}"
    section = recipe(text, "grpo.val_period=0", "grpo.val_at_start=false", "grpo.val_at_end=false")["data"]["train"]
    named = {"input_key": "ask", "output_key": "said"}
    (record,) = records_of({**section, **named}, "data.train", "completion")
    assert record.content == {"prompt": "2+2?", "completion": "4", **beside}
    (other,) = records_of({**section, **named, "output_key": "system"}, "data.train", "completion")
    assert other.content == {"prompt": "2+2?", "completion": "S"} | {k: v for k, v in beside.items() if k != "system"}


def test_texts_around_prompts(tmp_path: Path, recipe: Callable[..., Any]) -> None:
    """The oracle is the chat template's own rendering."""
    (tmp_path / "around.txt").write_text("Put it into \\boxed{{}}:\n{}\nNow.")
    (tmp_path / "system.txt").write_text("You count.")
    (tmp_path / "data.jsonl").write_text('{"question": "2+2?", "answer": "4"}\n' * 12)
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"  # noqa: E501
    text = f"""
policy: {{tokenizer: {{chat_template: "{template}"}}, max_total_sequence_length: 90}}
grpo: {{max_num_epochs: 2, num_prompts_per_step: 4}}
data:
  prompt_template: null
  env_name: math
  default: {{prompt_file: {tmp_path}/around.txt, system_prompt_file: {tmp_path}/system.txt}}
  train: {{dataset_name: ResponseDataset, data_path: {tmp_path}/data.jsonl, input_key: question, output_key: answer}}
  max_input_seq_length: null
"""
    off = ("grpo.val_period=0", "grpo.val_at_start=false", "grpo.val_at_end=false")
    config = recipe(text, *off, "policy.train_global_batch_size=32", "policy.train_micro_batch_size=32")
    tokenizer = load_tokenizer(MODEL)
    tokenizer.chat_template = template
    train, _ = prompt_sets(prompt_data(config), config["env"]["reasoning_gym"], tokenizer, seed=1)
    said = tokenizer.decode(train.next_batch(1)[0].token_ids)
    assert said == "[system]You count.[user]Put it into \\boxed{}:\n2+2?\nNow.[assistant]"
    assert num_steps(config, train) == 6
    (tmp_path / "around.txt").write_text("{question}")
    with pytest.raises(DataError, match=r"data.prompt_file: .* has braces"):
        text_around(str(tmp_path / "around.txt"))


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"Think.", "has no place for the question"),
        (b"{{}}", "has no place for the question"),
        (b"\xff\xfe", "is not UTF-8 text"),
        (None, "is a folder"),
    ],
)
def test_prompt_files_that_cannot_be_used(tmp_path: Path, content: bytes | None, why: str) -> None:
    """Without the question's place every prompt would be the same text."""
    path = tmp_path / "around.txt"
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(DataError, match=f"^data.prompt_file: .*{why}"):
        text_around(str(path))


def test_a_beginning_token_stands_once(tmp_path: Path, recipe: Callable[..., Any]) -> None:
    (tmp_path / "data.jsonl").write_text('{"question": "2+2?", "answer": "4"}\n' * 16)
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    text = f"""
policy: {{tokenizer: {{chat_template: "{template}"}}}}
data:
  {{prompt_template: null, add_bos: true, add_eos: true, add_generation_prompt: false,
    train: {{path: {tmp_path}/data.jsonl}}}}
"""
    off = ("sft.val_period=0", "sft.val_at_start=false", "sft.val_at_end=false")
    size = ("policy.train_global_batch_size=16", "policy.train_micro_batch_size=16")
    tokenizer = load_tokenizer(MODEL)
    tokenizer.bos_token_id = tokenizer.convert_tokens_to_ids("z")
    for beginning in ("", "z"):
        tokenizer.chat_template = beginning + template
        (tmp_path / "data.jsonl").write_text('{"prompt": "2+2?", "completion": "4"}\n' * 16)
        stream, _, _ = sample_sets(
            recipe(text, *off, *size, algorithm="sft"), tokenizer, [tokenizer.eos_token_id], seed=1
        )
        row = stream.next_batch()[0][0]
        assert tokenizer.decode(row.token_ids).startswith("z[user]2+2?[assistant]4")
        assert not any(row.is_learned[:2])
        assert len(row.token_ids) == len(row.is_learned)


def test_packed_lines_of_a_split(hub: Path, recipe: Callable[..., Any]) -> None:
    snapshot = download(hub, "HelpSteer3", [])
    for file in (snapshot / "preference").iterdir():
        file.unlink()
    for name, num in (("train", 3), ("validation", 2)):
        pairs = [{"context": f"{n}?", "response1": "a", "response2": "b", "overall_preference": -1} for n in range(num)]
        with gzip.open(snapshot / "preference" / f"{name}.jsonl.gz", "wt") as packed:
            packed.write("".join(f"{json.dumps(pair)}\n" for pair in pairs))
    both = [f"{name}: {{dataset_name: HelpSteer3, split: {name}}}" for name in ("train", "validation")]
    config = recipe(f"data: {{{', '.join(both)}}}", algorithm="dpo")
    counts = [len(records_of(config["data"][name], f"data.{name}", "completion")) for name in ("train", "validation")]
    assert counts == [3, 2]
    (snapshot / "preference" / "train.jsonl.gz").write_bytes(b"no gzip")
    with pytest.raises(DataError, match=r"train\.jsonl\.gz cannot be read"):
        records_of(config["data"]["train"], "data.train", "completion")


def test_a_column_that_messages_lack_is_told_with_the_key_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text('{"messages": []}\n')
    section: Any = defaults_of(TrainingDataConfig) | {"path": str(path), "output_key": "solution"}
    (record,) = records_of(section, "data.train", "completion")
    assert str(record.content).endswith("and messages need none: data.train.output_key=null")


@pytest.mark.parametrize(("longest", "expected"), [(10, 10), (31, 31), (32, 31), (64, 31)])
def test_a_prompt_leaves_room_for_one_token(longest: int, expected: int) -> None:
    overrides = ["policy.max_total_sequence_length=32", f"data.max_input_seq_length={longest}"]
    config = load_config(PROJECT_ROOT / "examples/configs/grpo_tiny.yaml", overrides)
    assert prompt_data(config)["max_input_seq_length"] == expected
