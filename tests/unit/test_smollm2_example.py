"""The example of a real model: its configurations pass `check`, its data are right, and its reward reads answers.

Weights are not shipped; a folder of the model's shape stands for them.
"""

import json
import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
from transformers import LlamaConfig

from nemo_rl_offload.config.loader import PROJECT_ROOT, load_config
from nemo_rl_offload.config.validation import check_config

FOLDER = PROJECT_ROOT / "examples/smollm2"
CONFIGURATIONS = sorted(FOLDER.glob("*.yaml"))


def load(name: str) -> ModuleType:
    spec = spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What prepare.py writes, but for the weights and the tokenizer's files."""
    out = tmp_path_factory.mktemp("smollm2")
    load("prepare").write_data(out)
    LlamaConfig(
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        eos_token_id=2,
    ).save_pretrained(out / "model")
    tiny = PROJECT_ROOT / "examples/models/tiny_speller"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (out / "model" / name).write_bytes((tiny / name).read_bytes())
    return out


@pytest.mark.parametrize("path", CONFIGURATIONS, ids=lambda path: path.stem)
def test_configurations_are_valid(path: Path, made: Path) -> None:
    assert len(CONFIGURATIONS) == 6
    files = [f"data.{split}.path={made / split}.jsonl" for split in ("train", "validation")]
    config = load_config(path, [f"policy.model_name={made / 'model'}", *files])
    checked = check_config(config, path.name, run_here=False)
    assert [line for line in checked.warnings if not line.endswith("Only a run needs it.")] == []
    policy = checked.config["policy"]["megatron_cfg"]
    assert policy["fine_grained_activation_offloading"]
    assert policy["peft"]["enabled"] == ("lora" in path.stem)


def records_of(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_data_are_right_and_validation_is_kept_out_of_training(made: Path) -> None:
    train, validation = (records_of(made / f"{split}.jsonl") for split in ("train", "validation"))
    assert len(train) > 1000
    assert len(validation) > 100
    assert not {each["prompt"] for each in train} & {each["prompt"] for each in validation}
    score = load("last_number").last_number
    for record in (*train, *validation):
        first, *rest = re.findall(r"[-+]? ?\d", record["prompt"])
        assert int(first) + sum(int(term.replace(" ", "")) for term in rest) == int(record["answer"])
        assert record["completion"] == record["answer"]
        assert score([{"role": "assistant", "content": record["completion"]}], record) == 1.0


@pytest.mark.parametrize(
    ("said", "reward"),
    [
        ("7", 1.0),
        ("3 + 4 = 7", 1.0),
        ("The answer is 7.", 1.0),
        ("**7**", 1.0),
        ("07", 1.0),
        ("7, for 3 + 4 is 7", 1.0),
        ("", 0.0),
        ("seven", 0.0),
        ("-7", 0.0),
        ("7 or 8", 0.0),
        ("77", 0.0),
        ("7.5", 0.0),
        ("3 + 4", 0.0),
    ],
)
def test_the_last_number_counts(said: str, reward: float) -> None:
    messages = [{"role": "user", "content": "What is 3 + 4?"}, {"role": "assistant", "content": said}]
    assert load("last_number").last_number(messages, {"answer": "7"}) == reward


def test_large_and_negative_numbers_are_read() -> None:
    score = load("last_number").last_number
    assert score([{"role": "assistant", "content": "It is 1,234."}], {"answer": "1234"}) == 1.0
    assert score([{"role": "assistant", "content": "5 - 9 = -4."}], {"answer": "-4"}) == 1.0
    assert score([{"role": "assistant", "content": "12, 13, 14"}], {"answer": "14"}) == 1.0
