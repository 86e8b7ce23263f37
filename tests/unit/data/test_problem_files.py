"""Problems from files: what a record may look like, and how bad ones are told."""

import json
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_offload.config.loader import PROJECT_ROOT, load_config
from nemo_rl_offload.data.problem_files import read_problems
from nemo_rl_offload.data.prompts import prompt_sets
from nemo_rl_offload.data.reasoning_gym import Problem
from nemo_rl_offload.data.records import read_section
from nemo_rl_offload.data.tokenizer import load_tokenizer
from nemo_rl_offload.errors import DataError


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


def read(path: Path, *, needs_answer: bool = True, skips_bad: bool = False) -> list[Problem]:
    records = read_section("data.train", path, None)
    return read_problems(records, name="data.train", needs_answer=needs_answer, skips_bad=skips_bad)[0]


@pytest.mark.parametrize("question", ["prompt", "question", "problem", "input"])
@pytest.mark.parametrize("answer", ["answer", "expected_answer", "output"])
def test_usual_names_of_keys(question: str, answer: str, tmp_path: Path) -> None:
    (problem,) = read(write(tmp_path / "a.jsonl", {question: "1+1?", answer: 2, "level": 3}))
    assert (problem.question, problem.answer) == ("1+1?", "2")
    assert problem.entry == {question: "1+1?", answer: 2, "level": 3, "answer": "2"}


def test_bad_records_are_told_with_their_place_or_left_out(tmp_path: Path) -> None:
    good = {"prompt": "1+1?", "answer": "2"}
    file = write(tmp_path / "a.jsonl", good, {"promt": "?"}, {"prompt": "?"}, [1])
    with pytest.raises(DataError) as caught:
        read(file)
    text = str(caught.value)
    assert text.startswith("data.train: 3 record(s) cannot be used\n")
    assert f"{file}:2: has no question as text under one of prompt, question, problem, input, or what " in text
    assert "data.train.input_key names; it has promt" in text
    assert f"{file}:3: has no answer under one of answer, expected_answer, output, or what data.train.output" in text
    assert f"{file}:4: is list, not an object" in text
    with pytest.warns(UserWarning, match="left 3 bad record"):
        assert [problem.entry for problem in read(file, skips_bad=True)] == [good]
    with pytest.warns(UserWarning, match="left 2 bad record"):
        assert len(read(file, needs_answer=False, skips_bad=True)) == 2
    with pytest.raises(DataError, match="1 record"):
        read(write(tmp_path / "b.jsonl", {}), skips_bad=True)
    with pytest.raises(DataError, match=r"data\.train\.path: there are no problems"):
        read(write(tmp_path / "c.jsonl"))


def test_both_files_are_told_of_at_once(tmp_path: Path) -> None:
    files = {"train": write(tmp_path / "t.jsonl", {}), "validation": tmp_path / "v.txt"}
    files["validation"].touch()
    paths = [f"data.{name}.path={path}" for name, path in files.items()]
    config: Any = load_config(PROJECT_ROOT / "examples/configs/grpo_tiny.yaml", [*paths, "data.env_name=math"])
    tokenizer = load_tokenizer(PROJECT_ROOT / "examples/models/tiny_speller")
    with pytest.raises(DataError) as caught:
        prompt_sets(config["data"], config["env"]["reasoning_gym"], tokenizer, seed=1)
    assert f"data.validation.path: {files['validation']}: unknown kind of file" in str(caught.value)
    assert "\ndata.train: 1 record(s) cannot be used\n" in str(caught.value)


def test_bad_records_of_a_file_that_is_split_are_told_once_in_its_order(tmp_path: Path) -> None:
    file = write(tmp_path / "t.jsonl", *[{"prompt": f"{n}+{n}?", "answer": str(2 * n)} for n in range(8)], *[{}] * 5)
    given = [f"data.train.path={file}", "data.env_name=math", "data.train.split_validation_size=0.5"]
    config: Any = load_config(PROJECT_ROOT / "examples/configs/grpo_tiny.yaml", given)
    config["data"]["validation"]["path"] = None
    tokenizer = load_tokenizer(PROJECT_ROOT / "examples/models/tiny_speller")
    with pytest.raises(DataError) as caught:
        prompt_sets(config["data"], config["env"]["reasoning_gym"], tokenizer, seed=1)
    head, line, _ = str(caught.value).splitlines()
    assert head == "data.train: 5 record(s) cannot be used"
    assert line.startswith(f"{file}:9, 10, 11, 12, 13: has no question")


def test_prompts_from_files(tmp_path: Path) -> None:
    """Held-out questions are not trained on, and the order can be resumed."""
    problems = [{"prompt": f"{n}+{n}?", "answer": str(2 * n)} for n in range(6)]
    train, validation = write(tmp_path / "t.jsonl", *problems), write(tmp_path / "v.jsonl", *problems[:2])
    paths = [f"data.train.path={train}", f"data.validation.path={validation}", "data.env_name=math"]
    config: Any = load_config(PROJECT_ROOT / "examples/configs/grpo_tiny.yaml", paths)
    tokenizer = load_tokenizer(PROJECT_ROOT / "examples/models/tiny_speller")
    task = config["env"]["reasoning_gym"]
    stream, held_out = prompt_sets(config["data"], task, tokenizer, seed=1)
    assert [prompt.problem.question for prompt in held_out] == ["0+0?", "1+1?"]
    drawn = stream.next_batch(4)
    assert {prompt.problem.question for prompt in drawn} == {f"{n}+{n}?" for n in range(2, 6)}
    assert all(prompt.problem.entry["answer"] == prompt.problem.answer for prompt in drawn)
    state = stream.state_dict()
    again, _ = prompt_sets(config["data"], task, tokenizer, seed=1)
    again.load_state_dict(state)
    assert again.next_batch(3) == stream.next_batch(3)
    config["data"]["validation"]["path"] = None
    assert prompt_sets(config["data"], task, tokenizer, seed=1)[1] == []
