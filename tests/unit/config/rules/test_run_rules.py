"""Rules about everything outside `policy.megatron_cfg`: what breaks each, the essential words, a legal neighbor."""

from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_rl_offload.config.rules import runs as run_rules
from nemo_rl_offload.config.validation import CheckedConfig
from nemo_rl_offload.errors import ConfigError

Check = Callable[..., CheckedConfig]
Refuses = Callable[[str, str, str, str], None]
MakeModel = Callable[..., Path]
M = "policy.megatron_cfg"

COLOCATED = "policy.generation.colocated"
APART = f"{COLOCATED}.enabled=false cluster.gpus_per_node=4 {COLOCATED}.resources.gpus_per_node"
NODES_APART = f"{COLOCATED}.enabled=false cluster.num_nodes=3 {COLOCATED}.resources"
CASES = [
    (f"{COLOCATED}.enabled=false", f"{COLOCATED}.resources.gpus_per_node", "Give at least 1", f"{APART}=2"),
    (f"{APART}=4", f"{COLOCATED}.resources.gpus_per_node", "at least 5", f"{APART}=3"),
    (
        f"{APART}=2 {COLOCATED}.resources.num_nodes=2",
        f"{COLOCATED}.resources.num_nodes",
        "Set it to null",
        f"{APART}=2 {COLOCATED}.resources.num_nodes=1",
    ),
    (
        f"{NODES_APART}.num_nodes=3",
        f"{COLOCATED}.resources.num_nodes",
        "at least 4",
        f"{NODES_APART}.num_nodes=2",
    ),
    (
        f"{NODES_APART}.num_nodes=1 {COLOCATED}.resources.gpus_per_node=1",
        f"{COLOCATED}.resources.gpus_per_node",
        "Set it to null",
        f"{COLOCATED}.resources.gpus_per_node=null",
    ),
    (
        "data.max_input_seq_length=89",
        "policy.max_total_sequence_length",
        "Set at least 97",
        "policy.max_total_sequence_length=97",
    ),
    ("data.prompt_template=plain", "data.prompt_template", "Put {question}", "data.prompt_template=null"),
]


@pytest.mark.parametrize(("broken", "path", "words", "legal"), CASES)
def test_rules(refuses: Refuses, broken: str, path: str, words: str, legal: str) -> None:
    refuses(broken, path, words, legal)


@pytest.mark.parametrize(
    ("path", "file"),
    [("policy.model_name", "config.json"), ("policy.tokenizer.name", "tokenizer_config.json")],
)
def test_folders_must_exist(check: Check, dense_model: Path, path: str, file: str) -> None:
    with pytest.raises(ConfigError, match=rf"\n{path}: 'no/such' is not a local .* with a {file} \(looked in /"):
        check("policy.model_name=no/such", f"policy.tokenizer.name={dense_model}", f"{path}=no/such")


@pytest.mark.parametrize("run_here", [True, False])
@pytest.mark.parametrize(
    "path", ["policy.model_name", "policy.tokenizer.name", "teacher.model_name", "data.train.path"]
)
def test_no_name_is_a_problem_wherever_it_runs(check: Check, dense_model: Path, path: str, run_here: bool) -> None:
    with pytest.raises(ConfigError) as caught:
        check(f"policy.tokenizer.name={dense_model}", "data.env_name=math", f"{path}=", run_here=run_here)
    assert f"{path}: is empty. Give a local path." in str(caught.value).splitlines()
    assert str(caught.value).count(" is empty.") == 1


def test_a_check_elsewhere_only_warns_about_missing_folders(check: Check) -> None:
    checked = check("policy.model_name=no/such", f"{M}.offload_modules=[moe_act]", run_here=False)
    paths = ["policy.model_name", "policy.tokenizer.name", "policy.model_name"]
    assert [warning.split(":")[0] for warning in checked.warnings] == paths
    assert all(warning.endswith("Only a run needs it.") for warning in checked.warnings[:2])
    assert "rules about the model's layers were not checked" in checked.warnings[2]


@pytest.mark.parametrize(
    ("model", "legal", "refused"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", "mlp_act", "moe_act"),
        ("Qwen/Qwen3-30B-A3B", "moe_act", "mlp_act"),
        ("deepseek-ai/DeepSeek-V3", "[moe_act,mlp_act]", None),
        ("openai/gpt-oss-120b", "expert_fc1", "mlp_fc1"),
    ],
)
def test_public_models_need_no_folder(check: Check, model: str, legal: str, refused: str | None) -> None:
    def warnings(modules: str) -> list[str]:
        overrides = [f"policy.model_name={model}", f"{M}.offload_modules=[{modules.strip('[]')}]"]
        return check(*overrides, run_here=False).warnings

    assert all(line.endswith("Only a run needs it.") for line in warnings(legal))
    if refused is not None:
        with pytest.raises(ConfigError, match=f"'{refused}' needs layers with"):
            warnings(refused)


@pytest.mark.parametrize("content", ["{", "[]", "\x00"])
def test_a_broken_model_folder_is_one_problem(check: Check, make_model: MakeModel, content: str) -> None:
    model = make_model()
    (model / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"1 problem\npolicy\.model_name: .*config\.json"):
        check(f"policy.model_name={model}", f"{M}.offload_modules=[moe_act]")


@pytest.mark.parametrize("overrides", ["policy.megatron_cfg.scheduler.lr_decay_style=linear", "grpo.max_num_steps=6"])
def test_legal_combinations_pass_without_warning(check: Check, overrides: str) -> None:
    assert check(overrides).warnings == []


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_tracker_that_is_not_installed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_rules, "find_spec", lambda _: None)
    values = {f"logger.{other}_enabled": other == name for other in ("wandb", "mlflow")}
    problems = [line for rule in run_rules.RUN_RULES_OF_THIS_MACHINE for line in rule(values.__getitem__)]
    fix = f"Install it (`uv sync --group {name}`), or set this to false."
    assert problems == [f"logger.{name}_enabled: the package {name} is not installed. {fix}"]
    monkeypatch.setattr(run_rules, "find_spec", lambda _: object())
    assert [line for rule in run_rules.RUN_RULES_OF_THIS_MACHINE for line in rule(values.__getitem__)] == []
