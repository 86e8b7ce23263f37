"""Configurations of NeMo-RL's `run_eval`: what becomes of their keys."""

from pathlib import Path
from typing import Any

import pytest

from nemo_rl_offload.config.nemo_rl.translation import ALL_SAMPLES
from nemo_rl_offload.config.recipe import read_recipe
from nemo_rl_offload.config.sources import LoadedConfig
from nemo_rl_offload.config.validation import examine

FILE = """
eval: {metric: "pass@k", num_tests_per_prompt: 1, seed: 7, k_value: 1, save_path: null}
generation:
  backend: vllm
  max_new_tokens: ${generation.vllm_cfg.max_model_len}
  temperature: 0.0
  top_p: 1.0
  top_k: -1
  num_prompts_per_step: -1
  model_name: Qwen/Qwen2.5-1.5B-Instruct
  stop_token_ids: null
  vllm_cfg: {async_engine: false, precision: bfloat16, tensor_parallel_size: 1, max_model_len: 2048}
  colocated: {enabled: true, resources: {gpus_per_node: null, num_nodes: null}}
tokenizer: {name: "${generation.model_name}", chat_template: default, chat_template_kwargs: null}
data:
  max_input_seq_length: ${generation.vllm_cfg.max_model_len}
  prompt_file: null
  system_prompt_file: null
  dataset_name: AIME2024
  processor: math_hf_data_processor
  repeat: 3
env: {math: {num_workers: 8}}
cluster: {gpus_per_node: 1, num_nodes: 1}
"""


def read(folder: Path, *overrides: str) -> LoadedConfig:
    file = folder / "eval.yaml"
    file.write_text(FILE)
    return read_recipe(file, overrides)


def value(loaded: LoadedConfig, path: str) -> Any:
    node: Any = loaded.values
    for part in path.split("."):
        node = node[part]
    return node


def test_lengths_that_a_file_lacks_are_the_engines(tmp_path: Path) -> None:
    file = tmp_path / "eval.yaml"
    lengths = [line for line in FILE.splitlines() if "max_input_seq_length" in line or "max_new_tokens" in line]
    assert len(lengths) == 2
    file.write_text("\n".join(line for line in FILE.splitlines() if line not in lengths))
    loaded = read_recipe(file, [])
    assert problems(loaded) == []
    for path in ("data.max_input_seq_length", "policy.generation.max_new_tokens"):
        assert value(loaded, path) == 2048


def problems(loaded: LoadedConfig) -> list[str]:
    return [str(problem) for problem in examine(loaded, run_here=False).problems]


def test_keys_are_where_a_run_has_them(tmp_path: Path) -> None:
    loaded = read(tmp_path)
    assert problems(loaded) == []
    expected = {
        "policy.model_name": "Qwen/Qwen2.5-1.5B-Instruct",
        "policy.tokenizer.name": "Qwen/Qwen2.5-1.5B-Instruct",
        "policy.precision": "bfloat16",
        "policy.max_total_sequence_length": 2048,
        "policy.generation.backend": "vllm",
        "policy.generation.max_new_tokens": 2048,
        "policy.generation.val_temperature": 0.0,
        "policy.generation.val_top_k": None,
        "grpo.val_batch_size": ALL_SAMPLES,
        "grpo.max_val_samples": ALL_SAMPLES,
        "data.env_name": "math",
        "data.validation.path": "hf://datasets/HuggingFaceH4/aime_2024",
        "data.validation.repeat": 3,
        "data.train.path": "hf://datasets/HuggingFaceH4/aime_2024",
        "env.math.num_workers": 8,
        "eval.seed": 7,
    }
    assert {path: value(loaded, path) for path in expected} == expected
    assert loaded.origin("policy.model_name").endswith("eval.yaml:10")


@pytest.mark.parametrize(
    ("overrides", "path", "expected"),
    [
        (["generation.temperature=0.6"], "policy.generation.val_temperature", 0.6),
        (["generation.temperature=0.6", "+generation.val_temperature=0.2"], "policy.generation.val_temperature", 0.2),
        (["generation.max_new_tokens=100"], "policy.generation.max_new_tokens", 100),
        (["generation.top_k=20"], "policy.generation.val_top_k", 20),
        (["generation.num_prompts_per_step=16"], "grpo.val_batch_size", 16),
        (["data.dataset_name=/data/mine.jsonl", "+data.problem_key=Q"], "data.validation.path", "/data/mine.jsonl"),
        (["data.dataset_name=/data/mine.jsonl", "+data.problem_key=Q"], "data.validation.input_key", "Q"),
        (["data.dataset_name=me/mine", "+data.solution_key=A"], "data.validation.path", "hf://datasets/me/mine"),
        (["data.dataset_name=me/mine", "+data.solution_key=A"], "data.validation.output_key", "A"),
    ],
)
def test_other_values(tmp_path: Path, overrides: list[str], path: str, expected: object) -> None:
    loaded = read(tmp_path, *overrides)
    assert problems(loaded) == []
    assert value(loaded, path) == expected


@pytest.mark.parametrize(
    ("overrides", "path", "text"),
    [
        (["eval.metric=maj@k"], "eval.metric", "Allowed: 'pass@k' or 'cons@k'"),
        (["eval.metric=cons@k", "data.env_name=function"], "eval.metric", "Set pass@k, or data.env_name to math or"),
        (
            [
                *("eval.metric=cons@k", "eval.num_tests_per_prompt=64", "generation.temperature=0.6"),
                "eval.k_value=32",
            ],
            "eval.k_value",
            "cons@k votes in each choice of 32 out of 64 responses, of which there are more than 200000",
        ),
        (["eval.num_tests_per_prompt=4", "generation.temperature=0.6", "eval.k_value=5"], "eval.k_value", "at most"),
        (["eval.num_tests_per_prompt=4"], "eval.num_tests_per_prompt", "all be the same"),
        (["data.dataset_name=mmlu"], "data.validation.dataset_name", "a data set of this name, not supported here"),
        (["+generation.temperture=0.5"], "policy.generation.temperture", "'temperature'"),
        (["generation.backend=sglang"], "policy.generation.backend", "SGLang"),
        (["generation.vllm_cfg.max_model_len=many"], "policy.generation.vllm_cfg.max_model_len", "is not allowed"),
    ],
)
def test_what_is_refused(tmp_path: Path, overrides: list[str], path: str, text: str) -> None:
    found = problems(read(tmp_path, *overrides))
    assert any(line.startswith(f"{path}: ") and text in line for line in found), found


def read_text(folder: Path, text: str, algorithm: str | None = None) -> LoadedConfig:
    file = folder / "eval.yaml"
    file.write_text(text)
    return read_recipe(file, (), algorithm)


OF_A_FILE = "data: {dataset_name: AIME2024}\nenv: {math: {num_workers: 1}}\n"


@pytest.mark.parametrize(
    ("given", "path", "expected"),
    [
        ("stop_token_ids: [1, 2]", "policy.generation.stop_token_ids", [1, 2]),
        ("stop_strings: [x]", "policy.generation.stop_strings", ["x"]),
        ("vllm_cfg: {precision: fp8}", "policy.generation.vllm_cfg.precision", "fp8"),
        ("vllm_cfg: {precision: fp8}", "policy.precision", "bfloat16"),
        ("vllm_cfg: {precision: float32}", "policy.precision", "float32"),
        ("vllm_cfg: {}", "policy.generation.vllm_cfg.tensor_parallel_size", 1),
        ("vllm_cfg: null", "policy.generation.vllm_cfg.tensor_parallel_size", 1),
    ],
)
def test_lists_and_sections_without_keys(tmp_path: Path, given: str, path: str, expected: object) -> None:
    loaded = read_text(tmp_path, f"generation: {{model_name: some/model, {given}}}\n{OF_A_FILE}")
    assert problems(loaded) == []
    assert value(loaded, path) == expected


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("generation: {}", ["policy.model_name"]),
        ("generation: {model_name: m, top_p: [1], temperature: hot}", ["policy.generation.top_p", "temperature: "]),
        ("generation: {model_name: m, vllm_cfg: 3}", ["policy.generation.vllm_cfg: 3 is not allowed"]),
        ("generation: {model_name: m}\ntokenizer: 3", ["policy.tokenizer: 3 is not allowed"]),
        ("generation: {model_name: m}\ndata: 3", ["data: 3 is not allowed"]),
        ("generation: {model_name: m}\ndata: {validation: 3}", ["data.validation: 3 is not allowed"]),
        ("generation: {model_name: m}\ndata: {dataset_name: [1]}", ["data.validation.dataset_name: [1] is not"]),
        ("generation: {model_name: m}\ngrpo: x\nloss_fn: 4", ["grpo: ", "loss_fn: 4 is not allowed"]),
    ],
)
def test_values_of_wrong_types_are_named(tmp_path: Path, text: str, wrong: list[str]) -> None:
    found = problems(read_text(tmp_path, text))
    assert all(any(each in line for line in found) for each in wrong), found


def test_a_policy_beside_it_makes_it_no_evaluation(tmp_path: Path) -> None:
    """A section of `policy` that was written beside it would turn training into something else."""
    others = "policy: {model_name: m}\nloss_fn: {reference_policy_kl_penalty: 0.1}\n"
    text = f"generation: {{temperature: 0.5}}\n{others}{OF_A_FILE}"
    loaded = read_text(tmp_path, text)
    assert any(line.startswith("generation: unknown key. It belongs to policy") for line in problems(loaded))
    assert value(loaded, "loss_fn.reference_policy_kl_penalty") == 0.1


def test_it_is_not_trained(tmp_path: Path) -> None:
    text = f"generation: {{model_name: m}}\n{OF_A_FILE}"
    assert problems(read_text(tmp_path, text)) == []
    (line,) = problems(read_text(tmp_path, text, "grpo"))
    assert line.startswith("generation: ")
    assert "nemo-rl-offload eval" in line
