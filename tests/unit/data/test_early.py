"""What `check` finds in data of this machine: whatever the run would end with, and nothing where it would not."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_offload.cli.check import check_file, with_data
from nemo_rl_offload.config.loader import PROJECT_ROOT, load_config
from nemo_rl_offload.config.validation import Findings
from nemo_rl_offload.data import early

CONFIGS = PROJECT_ROOT / "examples" / "configs"
SFT, GRPO, DPO = (CONFIGS / f"{name}_tiny.yaml" for name in ("sft", "grpo", "dpo"))
CHAT = [
    {"messages": [{"role": "user", "content": f"hi {i}"}, {"role": "assistant", "content": "a"}]} for i in range(70)
]
PROBLEMS = [{"question": f"{i}+1\n", "answer": str(i + 1)} for i in range(70)]
MATH = ("data.env_name=math",)
Look = Callable[..., Findings]


@pytest.fixture
def look(tmp_path: Path) -> Look:
    def look(config: Path, records: list[dict[str, Any]], *overrides: str) -> Findings:
        train, validation = tmp_path / "train.jsonl", tmp_path / "validation.jsonl"
        train.write_text("".join(json.dumps(each) + "\n" for each in records))
        validation.write_text("".join(f"{json.dumps(each)}\n" for each in records[:5]))
        return with_data(
            check_file(config, [f"data.train.path={train}", f"data.validation.path={validation}", *overrides])
        )

    return look


@pytest.mark.parametrize(
    ("config", "records", "overrides", "path", "text"),
    [
        (SFT, CHAT[:5], (), "data.train", "5 samples do not fill a batch of policy.train_global_batch_size 64"),
        (SFT, [{"foo": 1}] * 70, (), "data.train", "it has foo"),
        (DPO, CHAT, (), "data.train", "cannot be used"),
        (GRPO, CHAT, MATH, "data.validation", "no question as text"),
        (GRPO, [{"question": "long " * 200, "answer": "1"}] * 70, MATH, "data.train", "none of 70 problems is usable"),
    ],
)
def test_what_a_run_would_end_with(
    look: Look, config: Path, records: list[dict[str, Any]], overrides: tuple[str, ...], path: str, text: str
) -> None:
    found = look(config, records, *overrides)
    assert found.config is None
    assert any(problem.path.startswith(path) and text in str(problem) for problem in found.problems), found.problems


def test_a_teacher_of_another_vocabulary_is_refused(look: Look, tmp_path: Path) -> None:
    ours, other = PROJECT_ROOT / "examples/models/tiny_speller", tmp_path / "other"
    shutil.copytree(ours, other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    for teacher, refused in ((other, 1), (ours, 0)):
        found = look(CONFIGS / "distillation_tiny.yaml", PROBLEMS, *MATH, f"teacher.model_name={teacher}")
        told = [str(each) for each in found.problems if "another vocabulary than the student's" in str(each)]
        assert len(told) == len(found.problems) == refused, found.problems


def test_data_are_looked_at_where_the_teacher_is_elsewhere(look: Look) -> None:
    found = look(CONFIGS / "distillation_tiny.yaml", [{"problem": 1}] * 70, *MATH, "teacher.model_name=not/here")
    assert any("data.train: 70 record(s) cannot be used" in str(each) for each in found.problems), found.problems


def test_an_evaluation_asks_no_teacher(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"problem": 1}\n')
    paths = [f"data.{name}.path={tmp_path / 'bad.jsonl'}" for name in ("train", "validation")]
    overrides = [*MATH, *paths, "teacher.model_name=not/here"]
    config: Any = load_config(CONFIGS / "distillation_tiny.yaml", overrides)
    (told,) = early.data_problems(config, trains=False)
    assert told.startswith("data.validation: 1 record(s) cannot be used")


def test_a_template_that_is_none_is_told_once(look: Look) -> None:
    found = look(CONFIGS / "sft_chat.yaml", CHAT, "policy.tokenizer.chat_template=nothere.jinja")
    told = [str(each) for each in (*found.problems, *found.warnings) if "nothere.jinja" in str(each)]
    assert len(told) == len(found.problems) == 1, told


@pytest.mark.parametrize(("config", "records", "overrides"), [(SFT, CHAT, ()), (GRPO, PROBLEMS, MATH)])
def test_sound_data_pass(look: Look, config: Path, records: list[dict[str, Any]], overrides: tuple[str, ...]) -> None:
    found = look(config, records, *overrides)
    assert (found.problems, found.config is not None) == ([], True)


def test_large_data_and_data_elsewhere_are_left_to_the_run(
    look: Look, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert look(SFT, CHAT[:5], "policy.model_name=some/where-else").problems == []
    assert look(SFT, CHAT[:5], f"data.train.path={tmp_path / 'other.jsonl'}").problems == []
    elsewhere = "data.prompt_file=no/such"  # told already, as what a run needs
    assert look(GRPO, PROBLEMS, *MATH, "data.prompt_template=null", elsewhere).problems == []
    monkeypatch.setattr(early, "LIMIT_BYTES", 100)
    assert look(SFT, CHAT[:5]).problems == []


def test_folders_that_hold_no_data_are_found(look: Look, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "part.jsonl").symlink_to(tmp_path / "nowhere")
    (tmp_path / "splits").mkdir()
    (tmp_path / "splits" / "dataset_dict.json").write_text("{}")
    for name, text in (("empty", "holds no data"), ("broken", "neither a file"), ("splits", "holds the splits")):
        (problem,) = look(SFT, CHAT, f"data.validation.path={tmp_path / name}").problems
        assert problem.path == "data.validation.path"
        assert text in problem.message


def test_an_evaluation_needs_no_problems_to_train_on(tmp_path: Path) -> None:
    """NeMo-RL's file names one data set, all of whose problems are held out."""
    data, file = tmp_path / "problems.jsonl", tmp_path / "eval.yaml"
    data.write_text("".join(json.dumps(each) + "\n" for each in PROBLEMS))
    model = PROJECT_ROOT / "examples" / "models" / "tiny_speller"
    file.write_text(
        f"generation: {{model_name: {model}, max_new_tokens: 8, vllm_cfg: {{max_model_len: 96}}}}\n"
        f'data: {{prompt_template: "{{question}}", dataset_name: {data}, max_input_seq_length: 80}}\n'
        "env: {math: {num_workers: 1}}\n"
    )
    assert with_data(check_file(file, ())).problems == []
    (problem,) = with_data(check_file(file, ["+data.problem_key=other"])).problems
    assert "has nothing under other" in problem.message
