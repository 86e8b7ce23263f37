"""Rules about NeMo-Gym: what breaks each, the essential words, a legal neighbor."""

import os
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_offload.config.loader import PROJECT_ROOT, load_config
from nemo_rl_offload.config.rules import nemo_gym, vllm
from nemo_rl_offload.config.rules.nemo_gym import gym_python
from nemo_rl_offload.config.validation import examine
from nemo_rl_offload.specs.generation import VLLM_VERSION

Refuses = Callable[[str, str, str, str], None]
GENERATION, GYM = "policy.generation", "env.nemo_gym"
CFG, CHAT = f"{GENERATION}.vllm_cfg", f"{GENERATION}.vllm_cfg.http_server_serving_chat_kwargs"
VLLM = f"{GENERATION}.backend=vllm {CFG}.async_engine=true"
DATA = "data.prompt_template=null data.train.path=README.md data.validation.path=README.md"
WITHOUT_PATHS = f"data.env_name=nemo_gym {VLLM} {DATA}"
BASE = f"{WITHOUT_PATHS} {GYM}.config={{config_paths:[a.yaml]}}"
DISTILLATION = "algorithm=distillation teacher.model_name=DENSE distillation.num_prompts_per_step=128"
TEMPLATE = "data.prompt_template='{question}'"
GENERATED = "data.env_name=reasoning_gym data.train.path=null data.validation.path=null"


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "find_spec", lambda name: ModuleSpec(name, None))
    monkeypatch.setattr(vllm, "installed_vllm", lambda: ("vllm", VLLM_VERSION))


@pytest.mark.parametrize(
    ("broken", "path", "words", "legal"),
    [
        (
            DISTILLATION,
            "data.env_name",
            "NeMo-Gym with distillation, not supported here: it leads episodes of grpo. Take one of reasoning_gym",
            "algorithm=grpo",
        ),
        (DISTILLATION, "data.env_name", "NeMo-Gym with distillation", GENERATED),
        (
            "grpo.reward_shaping.enabled=true grpo.reward_shaping.overlong_buffer_length=4",
            "grpo.reward_shaping.max_response_length",
            "any number of turns. Set it",
            "grpo.reward_shaping.max_response_length=64",
        ),
        (f"{GENERATION}.backend=megatron", f"{GENERATION}.backend", "Set it to vllm", f"{GENERATION}.backend=vllm"),
        (f"{CFG}.async_engine=false", f"{CFG}.async_engine", "one by one. Set it to true", f"{CFG}.async_engine=true"),
        (
            f"{GYM}.config.config_paths=[]",
            f"{GYM}.config.config_paths",
            "no list of files",
            f"{GYM}.config.config_paths=[b]",
        ),
        (
            f"{GYM}.config.config_paths=a",
            f"{GYM}.config.config_paths",
            "no list of files",
            f"{GYM}.config.config_paths=[a,b]",
        ),
        (
            f"{GYM}.config.config_paths=[a,1]",
            f"{GYM}.config.config_paths",
            "no list of files",
            f"{GYM}.config.config_paths=[a]",
        ),
        (TEMPLATE, "data.prompt_template", "whole conversations", "data.prompt_template=null"),
        ("data.prompt_file=README.md", "data.prompt_file", "Set it to null", "data.prompt_file=null"),
        ("data.system_prompt_file=README.md", "data.system_prompt_file", "null", "data.system_prompt_file=null"),
        *(
            (f"data.{split}.{key}_key=a", f"data.{split}.{key}_key", "Set it to null", f"data.{split}.{key}_key=null")
            for split in ("train", "validation")
            for key in ("input", "output")
        ),
        (f"{CHAT}.enable_auto_tools=true", f"{CHAT}.tool_parser", "such as hermes", f"{CHAT}.tool_parser=hermes"),
        (f"{CHAT}.enable_auto_tools=true", f"{CHAT}.tool_parser", "missing value", f"{CHAT}.enable_auto_tools=false"),
    ],
)
def test_rules(refuses: Refuses, broken: str, path: str, words: str, legal: str) -> None:
    refuses(f"{BASE} {broken}", path, words, legal)


def test_nemo_gym_is_told_which_servers_it_starts(refuses: Refuses) -> None:
    path = f"{GYM}.config.config_paths"
    refuses(WITHOUT_PATHS, path, "which servers NeMo-Gym starts. Give a list", f"{GYM}.config={{config_paths:[b]}}")
    refuses(f"{WITHOUT_PATHS} {GYM}.config={{policy_model:{{}}}}", path, "missing value", f"+{path}=[b]")


@pytest.mark.parametrize(
    "others",
    [
        f"{GENERATION}.backend=megatron {TEMPLATE}",
        f"{GENERATION}.backend=vllm {CHAT}.enable_auto_tools=true data.prompt_template=null",
    ],
)
def test_without_nemo_gym_none_of_them_counts(refusals: Callable[[str], list[str]], others: str) -> None:
    assert refusals(f"{others} {GYM}.python=no/such") == []


def test_who_does_not_generate_asks_for_nothing() -> None:
    loaded = load_config(PROJECT_ROOT / "examples/configs/sft_tiny.yaml", ["data.env_name=nemo_gym"])
    found = examine(loaded, run_here=False)
    assert not [each for each in [*found.problems, *found.warnings] if each.path.startswith((GYM, GENERATION))]


PATHS = f"{GYM}.config.config_paths."


def test_files_of_servers_are_here_or_where_nemo_gym_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = tmp_path / "env/lib/python3.12/site-packages"
    for place in (installed / "servers", installed / "nemo_gym", tmp_path / "env/bin", tmp_path / "own"):
        place.mkdir(parents=True)
    (tmp_path / "env/bin/python").symlink_to(sys.executable)
    (installed / "servers/there.yaml").touch()
    (installed / "nemo_gym/__init__.py").touch()
    (tmp_path / "own/mine.yaml").touch()
    monkeypatch.chdir(tmp_path / "own")
    files = "[servers/there.yaml,mine.yaml,servers/none.yaml,servers]"
    overrides = [*BASE.split(), f"{GYM}.python={tmp_path}/env/bin/python", f"{GYM}.config.config_paths={files}"]
    found = examine(load_config(PROJECT_ROOT / "examples/configs/grpo_tiny.yaml", overrides), run_here=True)
    said = {each.path: each.message for each in found.problems}
    assert list(said) == [f"{PATHS}2", f"{PATHS}3"]
    assert said[f"{PATHS}2"].startswith(
        f"servers/none.yaml is neither in {tmp_path}/own nor where nemo-gym is, {installed}"
    )
    (installed / "nemo_gym/__init__.py").unlink()  # as where it is installed from a clone, in which NeMo-Gym looks
    found = examine(load_config(PROJECT_ROOT / "examples/configs/grpo_tiny.yaml", overrides), run_here=True)
    assert not [each for each in found.problems if each.path.startswith(PATHS)]


def problems(*overrides: str, run_here: bool) -> dict[str, str]:
    loaded = load_config(PROJECT_ROOT / "examples/configs/grpo_tiny.yaml", [*BASE.split(), *overrides])
    found = examine(loaded, run_here=run_here)
    told = {each.path: each.message for each in [*found.problems, *([] if run_here else found.warnings)]}
    return {path: message for path, message in told.items() if not path.startswith(PATHS)}


def test_a_run_needs_a_python_with_nemo_gym(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = f"{GYM}.python"
    monkeypatch.setattr(nemo_gym, "PYTHON", tmp_path / "none/bin/python")
    for overrides, place in (([], tmp_path / "none/bin/python"), ([f"{key}={tmp_path}/other"], tmp_path / "other")):
        said = problems(*overrides, run_here=True)
        assert list(said) == [key]
        assert said[key].startswith(f"there is no {place}; nemo-gym needs an environment of its own. `uv venv")
        assert said[key].endswith("make one.")
        assert problems(*overrides, run_here=False)[key].endswith("Only a run needs it.")
    (tmp_path / "other").touch()
    for place in ("other", ""):
        said = problems(f"{key}={tmp_path}/{place}", run_here=True)
        assert "is no program. Give the python of an environment" in said[key]
    (tmp_path / "other").chmod(0o755)
    assert problems(f"{key}={tmp_path}/other", run_here=True) == {}


@pytest.mark.parametrize("key", ["invalid_tool_call_patterns", "thinking_tags"])
def test_an_empty_text_would_be_in_every_turn(key: str) -> None:
    said = problems(f"{GYM}.{key}=['<x>','']", run_here=False)
    assert said[f"{GYM}.{key}"].startswith("an empty text is in every turn")


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("pyton", "python"),
        ("mask_flagged_sample", "mask_flagged_samples"),
        ("skip_venv_if_presnt", "skip_venv_if_present"),
    ],
)
def test_a_key_much_like_another_is_said(key: str, meant: str) -> None:
    said = problems(f"+{GYM}.config.{key}=1", run_here=False)
    assert f"'{meant}'" in said[f"{GYM}.config.{key}"]
    assert f"{GYM}.config.{key}" not in problems(f"+{GYM}.config.{key}={{a: 1}}", run_here=False), "a server"


def test_the_python_is_the_environments_own_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it links to is outside of the environment."""
    (tmp_path / "python").symlink_to(os.devnull)
    assert gym_python(str(tmp_path / "python")) == tmp_path / "python"
    monkeypatch.chdir(tmp_path)
    assert gym_python("bin/../python") == tmp_path / "python"
    assert gym_python(None) == tmp_path / ".nemo-gym/bin/python"


@pytest.mark.parametrize("kind", ["tool", "reasoning"])
def test_a_plugin_is_a_file(tmp_path: Path, kind: str) -> None:
    key, python = f"{CFG}.{kind}_parser_plugin", f"{GYM}.python={sys.executable}"
    said = problems(python, f"{key}={tmp_path}", run_here=True)
    assert said == {key: f"there is no file {tmp_path}. Give one, or null."}
    (tmp_path / "plugin.py").touch()
    assert problems(python, f"{key}={tmp_path}/plugin.py", run_here=True) == {}


def test_a_parser_that_reads_no_calls_is_said(check: Any) -> None:
    def warned(*overrides: str) -> list[str]:
        checked = check(*BASE.split(), f"{CHAT}.tool_parser=hermes", *overrides, run_here=False)
        return [warning for warning in checked.warnings if warning.startswith(CHAT)]

    (said,) = warned()
    assert said.startswith(f"{CHAT}.tool_parser: has no effect while enable_auto_tools is false")
    assert warned(f"{CHAT}.enable_auto_tools=true") == []
