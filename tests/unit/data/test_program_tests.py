"""Tests of programs in records: the forms of public data sets, and what is said of others."""

import json
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_offload.config.loader import PROJECT_ROOT, load_config
from nemo_rl_offload.data.program_tests import tests_of
from nemo_rl_offload.data.prompts import prompt_sets
from nemo_rl_offload.data.tokenizer import load_tokenizer
from nemo_rl_offload.errors import DataError

tests_of.__test__ = False  # type: ignore[attr-defined]
PAIRS = [{"input": "1\n", "output": "2"}, {"input": "2\n3", "output": "4"}]


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (["assert f(1) == 2", "assert f(2) == 3"], [{"code": "assert f(1) == 2"}, {"code": "assert f(2) == 3"}]),
        ("assert f(1) == 2", [{"code": "assert f(1) == 2"}]),
        ('["assert f(1) == 2"]', [{"code": "assert f(1) == 2"}]),
        (PAIRS, PAIRS),
        (json.dumps(PAIRS), PAIRS),
        ([{**PAIRS[0], "testtype": "stdin"}], PAIRS[:1]),
        ({"inputs": ["1\n", ["2", 3]], "outputs": ["2", "4"]}, PAIRS),
        ('{"inputs": ["1\\n"], "outputs": [["2"]]}', PAIRS[:1]),
    ],
)
def test_forms(given: object, found: object) -> None:
    assert tests_of(given, {}) == found


def test_what_mbpp_has_beside_its_tests_comes_before_each() -> None:
    record = {"test_setup_code": "x = 1", "test_imports": ["import math", "import re"]}
    assert tests_of(["assert f(x)"], record) == [{"code": "x = 1\nimport math\nimport re\nassert f(x)"}]
    assert tests_of(["assert f(x)"], {"test_setup_code": "", "test_imports": []}) == [{"code": "assert f(x)"}]
    assert tests_of(PAIRS, record) == PAIRS


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ([], "has no tests"),
        (None, "has no tests"),
        (3, "has no tests"),
        ("", "no Python|without an assert"),
        ("[1", "whose JSON cannot be read: is not JSON"),
        (["f(1) == 2"], r"a test without an assert, which would always pass: 'f\(1\) == 2'"),
        (["assert (f(1) == 2, 'no')"], "which is always true. Leave out the brackets"),
        (["from __future__ import annotations\nassert f(1)\nreturn"], "no Python"),
        (["assert f("], r"no Python .*: 'assert f\('"),
        ([3], "neither statements .* nor an object with input and output"),
        ([{"input": "1"}], "neither statements"),
        ([{"input": "1", "output": 2}], "whose output is int, not text"),
        ([{**PAIRS[0], "testtype": "functional"}], "of testtype functional. Write it as statements"),
        ({"inputs": ["1"], "outputs": []}, "lists of the same length"),
        ({"inputs": [[1]], "outputs": [2], "fn_name": "f"}, r"call f \(fn_name\). Write them as statements"),
    ],
)
def test_what_cannot_be_used(given: object, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        tests_of(given, {})


def problems(tmp_path: Path, records: list[dict[str, Any]], *overrides: str) -> list[dict[str, Any]]:
    (tmp_path / "problems.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    config: Any = load_config(
        PROJECT_ROOT / "examples/configs/grpo_tiny.yaml",
        [f"data.train.path={tmp_path}/problems.jsonl", "data.env_name=code_tests", "data.shuffle=false", *overrides],
    )
    tokenizer = load_tokenizer(config["policy"]["model_name"])
    stream, _ = prompt_sets(config["data"], config["env"]["reasoning_gym"], tokenizer, 1)
    return [dict(prompt.problem.entry) for prompt in stream.next_batch(len(records))]


def test_columns_of_records(tmp_path: Path) -> None:
    plain = {"prompt": "add", "test_list": ["assert f(1)"], "test_imports": ["import re"], "answer": "unused"}
    (entry,) = problems(tmp_path, [plain])
    assert entry["tests"] == [{"code": "import re\nassert f(1)"}]
    named = {"text": "add", "checks": ["assert f(1)"], "test_setup_code": "x = 1", "tests": "of something else"}
    keys = ("data.train.input_key=text", "data.train.output_key=checks")
    (entry,) = problems(tmp_path, [named], *keys)
    assert entry["tests"] == [{"code": "x = 1\nassert f(1)"}]
    with pytest.raises(DataError, match=r"problems\.jsonl:1: has no tests under one of tests, test_list, input_output"):
        problems(tmp_path, [{"prompt": "add"}])
    with pytest.warns(UserWarning, match="left 1 bad record"):
        problems(tmp_path, [plain, {"prompt": "add", "tests": []}], "data.on_bad_line=skip")
