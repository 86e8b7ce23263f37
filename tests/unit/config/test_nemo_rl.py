"""A recipe of NeMo-RL is told from a mistake, and can be read as it stands."""

import copy
import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from mutations import mutate

from nemo_rl_offload.cli import command_line as cli
from nemo_rl_offload.cli.check import as_json, as_text
from nemo_rl_offload.config.loader import read_config
from nemo_rl_offload.config.nemo_rl import adapted, unsupported
from nemo_rl_offload.config.validation import examine

RECIPE = """\
grpo: {num_prompts_per_step: 32, num_generations_per_prompt: 16, max_num_epochs: 1, async_grpo: {enabled: false}}
loss_fn: {force_on_policy_ratio: false, ratio_clip_min: 0.2, kl_input_clamp_value: null}
checkpointing: {checkpoint_dir: results/grpo, metric_name: "val:total_reward/mean", save_period: 10}
policy:
  model_name: Qwen/Qwen2.5-1.5B
  tokenizer: {name: "${policy.model_name}", use_processor: false}
  max_total_sequence_length: 512
  max_grad_norm: 1.0
  dtensor_cfg: {enabled: true, tensor_parallel_size: 1}
  sequence_packing:
    enabled: true
    train_mb_tokens: ${mul:${policy.max_total_sequence_length}, ${policy.train_micro_batch_size}}
  make_sequence_length_divisible_by: ${policy.dtensor_cfg.tensor_parallel_size}
  optimizer: null
  megatron_cfg:
    enabled: false
    converter_type: Qwen2ForCausalLM
    pipeline_dtype: ${policy.precision}
    fine_grained_activation_offloading: true
    offload_modules: [core_attn, attn_proj]
    optimizer: {bf16: true, params_dtype: float32, clip_grad: "${policy.max_grad_norm}"}
    distributed_data_parallel_config: {overlap_grad_reduce: true, use_custom_fsdp: false}
  generation:
    backend: vllm
    max_new_tokens: ${policy.max_total_sequence_length}
    vllm_cfg: {gpu_memory_utilization: 0.6}
data:
  max_input_seq_length: ${policy.max_total_sequence_length}
  train: {dataset_name: OpenMathInstruct-2, seed: "${grpo.seed}"}
  validation: null
env:
  math: {num_workers: 8, math_verify_impl: hf_math_verify}
logger: {log_dir: logs, monitor_gpus: false}
"""
FROM_BASE = ("env.reasoning_gym.task",)
LOCAL = ("policy.model_name", "policy.tokenizer.name")
VALUES = (
    "policy.generation.backend",
    "checkpointing.metric_name",
    "data.validation",
    "policy.megatron_cfg.enabled",
    "policy.max_total_sequence_length",
)
KEYS = {
    "grpo.max_num_epochs",
    "grpo.async_grpo",
    "loss_fn.force_on_policy_ratio",
    "loss_fn.kl_input_clamp_value",
    "checkpointing.checkpoint_dir",
    "policy.tokenizer.use_processor",
    "policy.max_grad_norm",
    "policy.dtensor_cfg",
    "policy.make_sequence_length_divisible_by",
    "policy.optimizer",
    "policy.megatron_cfg.converter_type",
    "policy.megatron_cfg.pipeline_dtype",
    "policy.megatron_cfg.optimizer.bf16",
    "policy.megatron_cfg.optimizer.params_dtype",
    "policy.megatron_cfg.distributed_data_parallel_config.use_custom_fsdp",
    "policy.generation.vllm_cfg",
    "data.train.dataset_name",
    "env.math.math_verify_impl",
    "logger.log_dir",
    "logger.monitor_gpus",
}


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return path


def checked(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, list[dict[str, str]]]:
    code = cli.main(["check", "--format", "json", *map(str, arguments)])
    found: dict[str, list[dict[str, str]]] = json.loads(capsys.readouterr().out)
    assert code == (2 if found["problems"] else 0)
    return found


def test_a_recipe_can_be_read_as_it_stands(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = checked(capsys, recipe, "--allow-unsupported")
    assert found["problems"] == []
    assert sorted(warning["path"] for warning in found["warnings"]) == sorted([*KEYS, *VALUES, *FROM_BASE, *LOCAL])
    assert found["offloading"]["offload_modules"] == ["core_attn", "attn_proj"]  # type: ignore[call-overload]


def test_without_the_option_its_keys_are_problems_of_their_own_kind(
    recipe: Path, configs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe.write_text(f"defaults: {configs / 'base.yaml'}\n{RECIPE}")
    found = checked(capsys, recipe)["problems"]
    said = {problem["path"]: problem["message"] for problem in found}
    assert {path for path, text in said.items() if text.startswith("known to NeMo-RL, not supported here: ")} == {*KEYS}
    assert all(problem["origin"].startswith(f"{recipe}:") for problem in found if problem["path"] in KEYS)


def test_what_is_wrong_in_a_recipe_stays_a_problem(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = [
        "+grpo.sede=1",
        "policy.sequence_packing.train_mb_tokens=5",
        "policy.megatron_cfg.offload_modules=[atn]",
    ]
    found = checked(capsys, recipe, "--allow-unsupported", *overrides)
    assert {problem["path"] for problem in found["problems"]} == {
        "grpo.sede",
        "policy.sequence_packing.train_mb_tokens",
        "policy.megatron_cfg.offload_modules",
    }


def test_the_option_is_named_where_it_helps(recipe: Path, capsys: pytest.CaptureFixture[str], configs: Path) -> None:
    recipe.write_text(f"defaults: {configs / 'base.yaml'}\n{RECIPE}")
    assert cli.main(["check", str(recipe)]) == 2
    assert "add --allow-unsupported" in capsys.readouterr().err
    assert cli.main(["check", str(configs / "grpo_tiny.yaml"), "+grpo.sede=1"]) == 2
    assert "--allow-unsupported" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("path", "known"),
    [
        ("policy.dtensor_cfg", True),
        ("policy.megatron_cfg.peft", True),
        ("teacher.megatron_cfg.peft", True),
        ("grpo.peft", False),
        ("policy.dtensor_cf", False),
        ("dtensor_cfg", False),
    ],
)
def test_names_count_in_their_own_section(path: str, known: bool) -> None:
    assert (unsupported(path) is not None) is known


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_mutated_recipe_never_ends_in_another_error(configs: Path, data: st.DataObject) -> None:
    defaults = yaml.safe_load((configs / "base.yaml").read_text())
    raw = copy.deepcopy(_resolved(configs))
    mutate(data, raw)
    found = examine(raw, run_here=False, nemo_rl_defaults=defaults)
    told = json.loads(as_json(Path("recipe.yaml"), found))
    assert (told["offloading"] is None) is bool(told["problems"])
    assert len(as_text(Path("recipe.yaml"), found).splitlines()) >= len(told["problems"]) + len(told["warnings"])


@cache
def _resolved(configs: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recipe.yaml"
        path.write_text(RECIPE)
        return read_config(path, below=[configs / "base.yaml"]).values


def test_adapted_values() -> None:
    values = yaml.safe_load("a: {b: 1, c: {d: 2, e: 3}, f: [4]}")
    defaults = yaml.safe_load("a: {b: 5, c: {d: 6}}")
    assert adapted(values, defaults, {"a.b", "a.c.e"}) == yaml.safe_load("a: {b: 5, c: {d: 2}, f: [4]}")
    assert adapted(values, defaults, {"a.c", "a.f"}) == yaml.safe_load("a: {b: 1, c: {d: 6}}")
