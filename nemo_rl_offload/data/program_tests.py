"""Tests of a program, as public data sets have them: statements of Python, or texts to be read and printed.

Each becomes `{"code": ...}` or `{"input": ..., "output": ...}`. A column is either's list; or, as in APPS, TACO and
LiveCodeBench, an object of two lists, or the JSON of one of these.
"""

import ast
import sys
from collections.abc import Mapping
from typing import Any

from nemo_rl_offload.specs.documents import DocumentError, parse_json

TESTS = ("tests", "test_list", "input_output", "answer")
"""Columns, the first of which counts; the last is the one that the configuration names."""
SETUP = ("test_setup_code", "test_imports")
"""Columns that statements begin with, as in MBPP."""
_STATEMENTS = "statements of Python with an assert"


def tests_of(given: object, record: Mapping[str, object]) -> list[dict[str, str]]:
    """Return the tests that a column of a record holds. Raises ValueError with what is wrong."""
    if isinstance(given, str) and given.lstrip().startswith(("[", "{")):
        try:
            given = parse_json(given, max_values=sys.maxsize)
        except DocumentError as error:
            raise ValueError(f"has tests whose JSON cannot be read: {error.reason}") from error
    if isinstance(given, Mapping):
        given = _pairs(given)
    if isinstance(given, str):
        given = [given]
    if not isinstance(given, list) or not given:
        raise ValueError("has no tests: they are a list of statements, or of objects with input and output")
    setup = _setup(record)
    return [_statements(test, setup) if isinstance(test, str) else _pair(test) for test in given]


def _pairs(given: Mapping[Any, Any]) -> list[object]:
    if given.get("fn_name") is not None:
        raise ValueError(f"has tests that call {given['fn_name']} (fn_name). Write them as {_STATEMENTS}")
    inputs, outputs = given.get("inputs"), given.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise ValueError("has tests without inputs and outputs, lists of the same length")
    return [{"input": one, "output": other} for one, other in zip(inputs, outputs, strict=True)]


def _pair(test: object) -> dict[str, str]:
    if not isinstance(test, Mapping) or not {"input", "output"} <= test.keys():
        raise ValueError(f"has a test that is neither {_STATEMENTS} nor an object with input and output")
    if test.get("testtype", "stdin") != "stdin":
        raise ValueError(f"has a test of testtype {test['testtype']}. Write it as {_STATEMENTS}")
    texts = {key: test[key] for key in ("input", "output")}
    texts = {key: "\n".join(map(str, text)) if isinstance(text, list) else text for key, text in texts.items()}
    for key, text in texts.items():
        if not isinstance(text, str):
            raise ValueError(f"has a test whose {key} is {type(text).__name__}, not text")
    return texts


def _setup(record: Mapping[str, object]) -> str:
    parts: list[object] = []
    for key in SETUP:
        value = record.get(key)
        parts += value if isinstance(value, list) else [value or ""]
    if not all(isinstance(part, str) for part in parts):
        raise ValueError(f"has something else than text in {' or '.join(SETUP)}")
    return "".join(f"{part}\n" for part in parts if part)


def _statements(test: str, setup: str) -> dict[str, str]:
    try:
        tree = ast.parse(setup + test)
        compile(tree, "tests.py", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"has a test that is no Python ({error}): {test[:80]!r}") from error
    if not any(isinstance(node, ast.Assert | ast.Raise) for node in ast.walk(tree)):
        raise ValueError(f"has a test without an assert, which would always pass: {test[:80]!r}")
    if any(isinstance(node, ast.Assert) and isinstance(node.test, ast.Tuple) for node in ast.walk(tree)):
        raise ValueError(
            f"has an assert of (condition, message), which is always true. Leave out the brackets: {test[:80]!r}"
        )
    return {"code": setup + test}
