"""What `nemo-rl-offload eval` reads."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from nemo_rl_offload.cli.evaluate import _check_sampling, _quantized_once, _that_generates
from nemo_rl_offload.config.loader import PROJECT_ROOT
from nemo_rl_offload.config.recipe import read_recipe
from nemo_rl_offload.config.validation import schema_problems
from nemo_rl_offload.data.prompts import prompt_sets
from nemo_rl_offload.data.tokenizer import load_tokenizer
from nemo_rl_offload.errors import ConfigError, DataError

CONFIG = PROJECT_ROOT / "examples/configs/eval_tiny.yaml"


def evaluated(*overrides: str) -> Any:
    """The configuration that is evaluated."""
    return _that_generates(read_recipe(CONFIG, ["data.env_name=math", *overrides]), CONFIG).values


def prompts(config: Any) -> list[Any]:
    tokenizer: Any = load_tokenizer(PROJECT_ROOT / "examples/models/tiny_speller")
    return prompt_sets(config["data"], config["env"]["reasoning_gym"], tokenizer, 1)[1]


@pytest.fixture
def problems(tmp_path: Path) -> Path:
    path = tmp_path / "val.jsonl"
    path.write_text("".join(json.dumps({"question": f"{n}+1?", "answer": str(n + 1)}) + "\n" for n in range(3)))
    return path


@pytest.mark.parametrize("train", [None, "broken"])
def test_problems_to_train_on_are_not_read(train: str | None, problems: Path, tmp_path: Path) -> None:
    broken = tmp_path / "train.jsonl"
    broken.write_text('{"no": "question"}\n')
    given = [] if train is None else [f"data.train.path={broken}"]
    assert len(prompts(evaluated(f"data.validation.path={problems}", *given))) == 3


def test_further_problems_are_read(problems: Path, tmp_path: Path) -> None:
    further = tmp_path / "further.jsonl"
    further.write_text('{"question": "9+1?", "answer": "10"}\n')
    config = evaluated(f"data.validation.path={problems}", f"data.validation.further=[{{path: {further}}}]")
    assert schema_problems(config) == {}
    assert len(prompts(config)) == 4


def test_problems_drawn_from_those_to_train_on_are_read(problems: Path) -> None:
    config = evaluated(f"data.train.path={problems}", "data.train.split_validation_size=2")
    assert len(prompts(config)) == 2


def test_an_empty_file_is_told_once(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    with pytest.raises(DataError) as raised:
        prompts(evaluated(f"data.validation.path={empty}"))
    assert str(raised.value) == "data.validation.path: there are no problems. Give records with a question."


def test_an_engine_quantizes_no_folder(tmp_path: Path) -> None:
    on = ("policy.precision=bfloat16", "policy.quant_cfg=W4A16_NVFP4_CFG")
    by_megatron, by_vllm = (evaluated(*on, f"policy.generation.backend={name}") for name in ("megatron", "vllm"))
    assert _quantized_once(by_megatron, CONFIG, None) == by_megatron
    (tmp_path / "config.yaml").write_text("policy: {quant_cfg: null}")
    for run_dir in (None, tmp_path):
        with pytest.raises(ConfigError, match=r"policy.quant_cfg: an evaluation by vLLM is of weights as they are"):
            _quantized_once(by_vllm, CONFIG, run_dir)


def test_weights_of_a_run_that_quantized_them_are_not_quantized_again(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("policy: {quant_cfg: W4A16_NVFP4_CFG}")
    for backend in ("megatron", "vllm"):
        config = evaluated("policy.quant_cfg=W4A16_NVFP4_CFG", f"policy.generation.backend={backend}")
        assert _quantized_once(config, CONFIG, tmp_path)["policy"]["quant_cfg"] is None


@pytest.mark.parametrize(("key", "value"), [("top_k", 1), ("top_p", 0.5), ("temperature", 0.3)])
def test_sampling_that_no_evaluation_reads_is_refused(key: str, value: float, tmp_path: Path) -> None:
    """A run's file names no other keys; an exemplar's validation draws as training does unless it says otherwise."""
    of_run = tmp_path / "config.yaml"
    of_run.write_text(yaml.safe_dump(read_recipe(CONFIG).values))
    given, read = f"policy.generation.{key}={value}", f"policy.generation.val_{key}={value}"
    _check_sampling(read_recipe(CONFIG, [given]))
    _check_sampling(read_recipe(of_run, [given, read]))
    _check_sampling(read_recipe(of_run))
    with pytest.raises(
        ConfigError, match=f"^policy.generation.{key}: has no effect, .* by policy.generation.val_{key}"
    ):
        _check_sampling(read_recipe(of_run, [given]))
    _check_sampling(read_recipe(of_run, [given, f"policy.generation.val_{key}=1"]))
