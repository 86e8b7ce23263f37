import re
import subprocess
import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from nemo_rl_offload.config.loader import PROJECT_ROOT, load_config, read_config
from nemo_rl_offload.config.recipe import read_recipe
from nemo_rl_offload.config.validation import (
    CheckedConfig,
    check_config,
    check_to_plan,
    completed,
    examine,
    schema_problems,
)
from nemo_rl_offload.errors import ConfigError

M = "policy.megatron_cfg"
Check = Callable[..., CheckedConfig]
Tiny = Callable[..., dict[str, Any]]


def problems(check: Check, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        check(*overrides)
    head, *lines = str(caught.value).splitlines()
    assert head == f"tiny.yaml: {len(lines)} problem{'s' if len(lines) > 1 else ''}"
    return lines


@pytest.mark.parametrize("name", [path.name for path in (PROJECT_ROOT / "examples/configs").glob("*.yaml")])
def test_shipped_configurations_are_valid(configs: Path, dense_model: Path, moe_model: Path, name: str) -> None:
    overrides = ["env.reasoning_gym.task=spell_backward"] if name == "base.yaml" else []
    model = moe_model if "moe" in name else dense_model
    config = load_config(configs / name, [f"policy.model_name={model}", *overrides])
    checked = check_config(config, name, run_here=False)
    needs_files = "tiny" not in name or "vllm" in name or "async" in name
    assert [line for line in checked.warnings if not (needs_files and line.endswith("Only a run needs it."))] == []
    trains = not name.startswith("eval")
    assert not trains or {"fine_grained_activation_offloading", "offload_modules"} <= set(
        re.findall(r"^    (\w+):", (configs / name).read_text(), re.MULTILINE)
    )


def test_values_keep_their_types(check: Check) -> None:
    config = check(f"{M}.optimizer.lr=1", f"{M}.activation_offload.host_memory_budget=1").config
    lr = config["policy"]["megatron_cfg"]["optimizer"]["lr"]
    assert (lr, type(lr)) == (1.0, float)
    assert config["policy"]["megatron_cfg"]["activation_offload"]["host_memory_budget"] == 1.0
    assert config["policy"]["tokenizer"]["name"] == config["policy"]["model_name"]
    assert config["env"]["reasoning_gym"]["params"] == {"min_word_len": 3, "max_word_len": 5}


@pytest.mark.parametrize(
    ("override", "text"),
    [
        (f"+{M}.offload_module=[a]", "unknown key. Did you mean 'offload_modules'?"),
        ("+policy.offload_modules=[a]", f"unknown key. It belongs to {M}."),
        ("+zzz=1", "unknown key."),
        ("+max_num_epochs=1", "unknown key. It belongs to grpo."),
        ("+data.train.sede=1", "unknown key. Did you mean 'seed'?"),
        ("~grpo.seed", "missing. Allowed: a whole number from 0 below 4294967296."),
        ("~logger", "missing. Allowed: a section of keys."),
        ("grpo.seed=???", "missing value. Give one: grpo.seed=..."),
    ],
)
def test_keys_are_checked(check: Check, override: str, text: str) -> None:
    path = override.strip("+~").split("=")[0]
    assert problems(check, override) == [f"{path}: {text}"]


def test_a_key_of_every_algorithm_belongs_to_the_configured_one(tmp_path: Path, configs: Path) -> None:
    path = tmp_path / "flat.yaml"
    path.write_text(f"defaults: {configs / 'sft_tiny.yaml'}\nmax_num_steps: 3\n")
    (problem,) = examine(load_config(path), run_here=True).problems
    assert problem.message == "unknown key. It belongs to sft."


@pytest.mark.parametrize("text", ["policy.megatron_cfg.optimizer.lr: 1.0", "policy: {megatron_cfg.optimizer.lr: 1.0}"])
def test_a_path_is_no_key_of_a_file(text: str, tmp_path: Path, configs: Path) -> None:
    """It was advised to write the last part alone, which is no key there."""
    path = tmp_path / "flat.yaml"
    path.write_text(f"defaults: {configs / 'sft_tiny.yaml'}\n{text}\n")
    (problem,) = examine(read_config(path, whole=True), run_here=True).problems
    assert problem.message == ("a file nests its sections. Write policy: {megatron_cfg: {optimizer: {lr: ...}}}")


@pytest.mark.parametrize(
    ("override", "given", "allowed"),
    [
        ("logger=null", "null", "a section of keys."),
        ("grpo.seed='1'", '"1"', "a whole number from 0 below 4294967296."),
        ("grpo.seed=1.0", "1.0", "a whole number from 0 below 4294967296."),
        ("grpo.val_period=-1", "-1", "a whole number from 0."),
        ("grpo.seed=4294967296", "4294967296", "a whole number from 0 below 4294967296."),
        ("grpo.max_num_steps=true", "true", "a whole number above 0."),
        ("grpo.val_at_end=1", "1", "true or false."),
        (f"{M}.enabled=1", "1", "true or false."),
        (f"{M}.optimizer.lr=true", "true", "a number from 0."),
        (f"{M}.optimizer.lr=nan", "NaN", "a number from 0."),
        (f"{M}.optimizer.lr=inf", "Infinity", "a number from 0."),
        ("policy.model_name=3", "3", "text."),
        ("data.train.size=10000001", "10000001", "a whole number above 0 up to 10000000."),
        ("policy.generation.top_p=0", "0", "a number above 0 up to 1."),
        ("policy.generation.temperature=0.0", "0.0", "a number above 0."),
        ("loss_fn.ratio_clip_min=1.5", "1.5", "a number above 0 up to 1."),
        ("cluster.gpus_per_node=0", "0", "a whole number above 0, or 'auto'."),
        ("cluster.gpus_per_node=atuo", '"atuo"', "a whole number above 0, or 'auto'. Did you mean 'auto'?"),
        ("policy.precision=float16", '"float16"', "'float32' or 'bfloat16'. Did you mean 'bfloat16'?"),
        (
            f"{M}.offload_modules='core_attn,mlp_norm'",
            '"core_attn,mlp_norm"',
            "a list of text, or 'auto', or null. Write it as a list: [core_attn, mlp_norm]",
        ),
        ("data.validation.exclude=3", "3", "a list of sections."),
        (
            "env.function.params=null",
            "null",
            "a mapping of text to values. For an empty one: ~env.function.params. In a file that inherits it: "
            "{_override_: true}.",
        ),
        (f"{M}.activation_offload.host_memory_budget=1.5", "1.5", 'a number above 0 up to 1, or text like "72GiB".'),
        (f"{M}.activation_offload.host_memory_budget=null", "null", 'a number above 0 up to 1, or text like "72GiB".'),
        (f"{M}.activation_offload.host_memory_budget=[]", "[]", 'a number above 0 up to 1, or text like "72GiB".'),
    ],
)
def test_values_are_checked(check: Check, override: str, given: str, allowed: str) -> None:
    path = override.split("=")[0]
    assert problems(check, override)[0] == f"{path}: {given} is not allowed. Allowed: {allowed}"


def test_items_of_lists_are_checked(check: Check) -> None:
    assert problems(check, f"{M}.offload_modules=[core_attn,3]", "data.validation.exclude=[{seed:0}]") == [
        f"{M}.offload_modules.1: 3 is not allowed. Allowed: text.",
        "data.validation.exclude.0.size: missing. Allowed: a whole number above 0 up to 10000000.",
    ]


@pytest.mark.parametrize("section", ["logger", "env.reasoning_gym.params"])
def test_keys_that_are_not_text(tiny: Tiny, section: str) -> None:
    raw = tiny()
    node = raw
    for key in section.split("."):
        node = node[key]
    node[1] = 2  # type: ignore[index]
    with pytest.raises(ConfigError, match=rf"\n{section}\.1: unknown key\.$"):
        check_config(raw)


def test_an_environment_that_is_none_is_told_once(check: Check, tmp_path: Path) -> None:
    (line,) = problems(check, "data.env_name=mine", "+env.mine.function.path=a.py")
    assert line.startswith("data.env_name: \"mine\" is not allowed. Allowed: 'reasoning_gym' or ")
    assert problems(check, "+env.mine.function.path=a.py") == ["env.mine: unknown key."]
    other = problems(check, "data.env_name=mine", "+env.other.function.path=a.py")
    assert [line.split(":")[0] for line in other] == ["data.env_name", "env.other"]
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("data: {default: {env_name: mine}}\nenv: {mine: {function: {path: a.py}}}\n")
    found = examine(read_recipe(recipe), run_here=False).problems
    assert [each.path for each in found if "mine" in str(each)] == ["data.default.env_name"]


def test_everything_is_reported_together(check: Check) -> None:
    lines = problems(
        check,
        "grpo.seed=x",
        "+grpo.sede=1",
        "policy.train_micro_batch_size=7",
        f"{M}.offload_modules=[attn_proj]",
    )
    assert [line.split(":")[0] for line in lines] == [
        "grpo.seed",
        "grpo.sede",
        f"{M}.offload_modules",
        "policy.train_global_batch_size",
    ]


WRONG_TOO = [f"{M}.offload_modules=[x]", "policy.precison=float32"]


@pytest.mark.parametrize(
    ("override", "path", "text"),
    [
        ("policy.train_micro_batch_size=null", "policy.train_micro_batch_size", "null is not allowed"),
        ("policy.max_total_sequence_length=abc", "policy.max_total_sequence_length", '"abc" is not allowed'),
        ("policy.max_total_sequence_length=-1", "policy.max_total_sequence_length", "-1 is not allowed"),
        ("policy.logprob_batch_size=???", "policy.logprob_batch_size", "missing value. Give one"),
        ("~policy.model_name", "policy.model_name", "missing. Allowed: text."),
        ("policy.model_name=3", "policy.model_name", "3 is not allowed"),
        (
            "policy.precision=${policy.nowhere}",
            "policy.precision",
            "is made of policy.nowhere, a key that is not there.",
        ),
        ("policy.precision=${loss_fn}", "policy.precision", "is not allowed"),
        ("policy.train_micro_batch_size=${div:1,0}", "policy.train_micro_batch_size", "division by zero"),
    ],
)
def test_what_is_made_of_a_wrong_value_is_not_reported(configs: Path, override: str, path: str, text: str) -> None:
    found = examine(read_config(configs / "grpo_tiny.yaml", [override, *WRONG_TOO]), run_here=False)
    assert [problem.path for problem in found.problems] == ["", path, f"{M}.offload_modules"]
    assert text in found.problems[1].message


def test_values_made_of_each_other_are_reported(configs: Path) -> None:
    circle = ["grpo.seed=${grpo.val_period}", "grpo.val_period=${grpo.seed}"]
    found = examine(read_config(configs / "grpo_tiny.yaml", circle), run_here=False)
    assert found.problems
    assert {problem.path for problem in found.problems} <= {"grpo.seed", "grpo.val_period"}


@pytest.mark.parametrize("content", ["", "policy: {model_name: x}\n"])
def test_a_file_needs_to_inherit_nothing(tmp_path: Path, content: str) -> None:
    path = tmp_path / "top.yaml"
    path.write_text(content)
    paths = [problem.path for problem in examine(read_recipe(path), run_here=False).problems]
    assert paths == ["policy.model_name", "env.reasoning_gym.task"][bool(content) :]


def test_a_plan_is_told_what_a_check_is(tmp_path: Path, configs: Path) -> None:
    overrides = ["policy.max_total_sequence_length=abc", "grpo.seed=x", "nowhere=1"]
    with pytest.raises(ConfigError) as caught:
        check_to_plan(read_config(configs / "grpo_tiny.yaml", overrides), "tiny.yaml")
    head, *lines = str(caught.value).splitlines()
    assert head == "tiny.yaml: cannot be planned"
    assert [line.partition(":")[0] for line in lines] == ["override 'nowhere=1'", "policy.max_total_sequence_length"]
    (tmp_path / "empty.yaml").touch()
    with pytest.raises(ConfigError, match=r"\npolicy\.model_name: missing value"):
        check_to_plan(read_recipe(tmp_path / "empty.yaml"), "empty.yaml")


def test_a_whole_file_needs_no_defaults(tmp_path: Path, tiny: Tiny) -> None:
    path = tmp_path / "whole.yaml"
    path.write_text(yaml.safe_dump(tiny()))
    assert examine(read_config(path), run_here=False).problems == []


@pytest.mark.parametrize("override", ["~policy.generation", "policy=null", "grpo=[]", "data.train=7", f"~{M}"])
def test_rules_end_quietly_where_values_are_reported_already(check: Check, override: str) -> None:
    path = override.lstrip("~").split("=")[0]
    assert [line.split(":")[0] for line in problems(check, override)] == [path]


def test_checking_imports_nothing_heavy(configs: Path, dense_model: Path) -> None:
    code = (
        "import sys\n"
        "from nemo_rl_offload.config.validation import check_config\n"
        "from nemo_rl_offload.config.loader import PROJECT_ROOT, load_config\n"
        f"config = load_config('{configs / 'grpo_tiny.yaml'}', ['policy.model_name={dense_model}'])\n"
        "check_config(config)\n"
        "print(sorted({'torch', 'ray', 'transformers', 'megatron', 'reasoning_gym'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("section", "key", "expected"),
    [
        ("generation", "val_temperature", 0.7),  # the value of another key, which the run had
        ("generation", "val_top_p", 0.9),
        ("generation", "val_top_k", None),
        ("generation", "max_new_tokens", 256),
        ("tokenizer", "name", "the/model"),
    ],
)
def test_a_run_of_before_a_key_goes_on_as_it_was(
    configs: Path, dense_model: Path, section: str, key: str, expected: object
) -> None:
    saved = load_config(configs / "grpo_tiny.yaml")
    saved["policy"]["model_name"] = "the/model"
    saved["policy"]["generation"] |= {"temperature": 0.7, "top_p": 0.9, "top_k": None}
    del saved["policy"][section][key]
    assert schema_problems(saved)
    found = completed(saved)
    assert found["policy"][section][key] == expected
    assert not schema_problems(found)


@pytest.mark.parametrize(
    ("override", "path"),
    [
        (r'data.prompt_template="{question}\n"', "data.prompt_template"),
        (r'policy.generation.stop_strings=["a","\nQuestion:"]', "policy.generation.stop_strings.1"),
        (r'logger.wandb.name="a\nb"', "logger.wandb.name"),
        ('data.prompt_template="{question}\n"', None),
    ],
)
def test_letters_that_are_no_line_break_are_told(
    override: str, path: str | None, configs: Path, dense_model: Path
) -> None:
    loaded = read_recipe(configs / "grpo_tiny.yaml", [f"policy.model_name={dense_model}", override])
    told = [each.path for each in examine(loaded, run_here=True).warnings if "no line break" in each.message]
    assert told == ([path] if path else [])


def test_a_configuration_of_an_earlier_version_gets_every_key() -> None:
    """Also those whose default is the value of another key that came with them."""
    whole = load_config(PROJECT_ROOT / "examples/configs/grpo_tiny.yaml")
    earlier: dict[str, Any] = deepcopy(whole)
    del earlier["policy"]["quant_cfg"], earlier["policy"]["generation"]["quant_cfg"]
    del earlier["policy"]["generation"]["val_temperature"]
    found = completed(earlier)
    assert found["policy"] == whole["policy"]
    assert not [path for path in schema_problems(found) if path.startswith("policy")]
