"""Rules about everything outside `policy.megatron_cfg`: what breaks each, the essential words, a legal neighbor."""

from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_rl_offload.config.checks import CheckedConfig
from nemo_rl_offload.config.run_rules import task_names
from nemo_rl_offload.errors import ConfigError

Check = Callable[..., CheckedConfig]
Refusals = Callable[[str], list[str]]
MakeModel = Callable[..., Path]
M = "policy.megatron_cfg"

CASES = [
    (
        "policy.train_micro_batch_size=60",
        "policy.train_global_batch_size",
        "128 is not a multiple of train_micro_batch_size 60",
        "policy.train_micro_batch_size=32",
    ),
    (
        "policy.train_global_batch_size=256",
        "policy.train_global_batch_size",
        "Set 128 for one update per step",
        "grpo.num_prompts_per_step=32",
    ),
    (
        "grpo.num_generations_per_prompt=1 grpo.num_prompts_per_step=128",
        "grpo.num_generations_per_prompt",
        "at least 2",
        "grpo.use_leave_one_out_baseline=false",
    ),
    (
        "data.max_input_seq_length=89",
        "policy.max_total_sequence_length",
        "Set at least 97",
        "policy.max_total_sequence_length=97",
    ),
    ("data.prompt_template=plain", "data.prompt_template", "Put {question}", "data.prompt_template=null"),
    (
        "env.reasoning_gym.task=spel_backward",
        "env.reasoning_gym.task",
        "Did you mean 'spell_backward'?",
        "env.reasoning_gym.task=chain_sum",
    ),
    (
        "env.reasoning_gym.task=zzzzzz",
        "env.reasoning_gym.task",
        "Some of them: ",
        "env.reasoning_gym.task=composite",
    ),
]


@pytest.mark.parametrize(("broken", "path", "words", "legal"), CASES)
def test_rules(refusals: Refusals, broken: str, path: str, words: str, legal: str) -> None:
    (line,) = refusals(broken)
    assert line.startswith(f"{path}: ")
    assert words in line
    assert refusals(f"{broken} {legal}") == []


@pytest.mark.parametrize(
    ("path", "file"),
    [("policy.model_name", "config.json"), ("policy.tokenizer.name", "tokenizer_config.json")],
)
def test_folders_must_exist(check: Check, dense_model: Path, path: str, file: str) -> None:
    with pytest.raises(ConfigError, match=rf"\n{path}: 'no/such' is not a local .* with a {file} \(looked in /"):
        check("policy.model_name=no/such", f"policy.tokenizer.name={dense_model}", f"{path}=no/such")


def test_a_check_elsewhere_only_warns_about_missing_folders(check: Check) -> None:
    checked = check("policy.model_name=no/such", f"{M}.offload_modules=[moe_act]", run_here=False)
    assert [warning.split(":")[0] for warning in checked.warnings] == ["policy.model_name", "policy.tokenizer.name"]
    assert all(warning.endswith("Only a run needs it.") for warning in checked.warnings)


@pytest.mark.parametrize("content", ["{", "[]", "\x00"])
def test_a_broken_model_folder_is_one_problem(check: Check, make_model: MakeModel, content: str) -> None:
    model = make_model()
    (model / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"1 problem\npolicy\.model_name: .*config\.json"):
        check(f"policy.model_name={model}", f"{M}.offload_modules=[moe_act]")


@pytest.mark.parametrize("overrides", ["policy.megatron_cfg.scheduler.lr_decay_style=linear", "grpo.max_num_steps=1"])
def test_legal_combinations_pass_without_warning(check: Check, overrides: str) -> None:
    assert check(overrides).warnings == []


def test_task_names_are_those_that_reasoning_gym_registers() -> None:
    from reasoning_gym.factory import DATASETS

    assert task_names() == set(DATASETS)
