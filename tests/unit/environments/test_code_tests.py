"""Programs under test: which are right, where they stand in a response, and what is said where nothing is isolated."""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_offload.environments import code_processes
from nemo_rl_offload.environments.code_tests import CodeTestsEnvironment, last_program
from nemo_rl_offload.environments.interface import Episode, Score
from nemo_rl_offload.errors import ConfigError, WorkerError
from nemo_rl_offload.specs import sandbox

pytestmark = pytest.mark.skipif(sandbox.missing() is not None, reason=f"nothing is isolated here: {sandbox.missing()}")

TEMPERATURE = [{"code": "assert to_kelvin(0) == 273"}, {"code": "assert to_kelvin(-273) == 0"}]


@cache
def environment(**changed: Any) -> CodeTestsEnvironment:
    section: Any = {
        "test_timeout_s": 60.0,
        "program_memory": "1GiB",
        "sandbox": "required",
        "binary_reward": True,
        "thinking_tags": ("<think>", "</think>"),
        **changed,
    }
    return CodeTestsEnvironment(**section)


def score(tests: Sequence[Mapping[str, str]], response: str, **changed: Any) -> Score:
    episode = Episode({"tests": tests}, [{"role": "assistant", "content": response}])
    (result,) = environment(**changed).step([episode])
    return result


def fenced(program: str) -> str:
    return f"Here it is:\n```python\n{program}\n```\n"


def is_right(program: str, *tests: str) -> bool:
    return score([{"code": test} for test in tests], fenced(program)).is_correct


@pytest.mark.parametrize(
    ("program", "test"),
    [
        ("def f(x):\n    return [x, (x,), {x}, {x: None}, 1.5, 2j, b'x', frozenset()]",
         "assert f(1) == [1, (1,), {1}, {1: None}, 1.5, 2j, b'x', frozenset()]"),
        ("def f(x):\n    return x ** 20000", "assert f(2) == 2 ** 20000"),
        ("def f():\n    return float('inf'), True, 'ü\\ud800'", "assert f() == (float('inf'), True, 'ü\\ud800')"),
        ("from collections import Counter\ndef f(x):\n    return Counter(x)", "assert f('aab') == {'a': 2, 'b': 1}"),
        ("import numpy as np\ndef f(x):\n    return np.sum(x)", "assert f([1, 2]) == 3"),
        ("def f(x):\n    yield from range(x)", "assert list(f(3)) == [0, 1, 2] and next(f(1)) == 0"),
        ("def f(x):\n    raise ValueError(x)", "try:\n    f(1)\n    assert False\nexcept ValueError:\n    pass"),
        ("import math\ndef f(x):\n    return x / 3", "assert math.isclose(f(1), 0.333333, rel_tol=0.001)"),
        ("def f(x):\n    return x / 3", "import math\nassert math.isclose(f(1), 0.333333, rel_tol=0.001)"),
        ("def sum(a, b):\n    return a + b", "assert sum(1, 2) == 3"),
        ("class A:\n    def __init__(self, x):\n        self.x = x\n    def __len__(self):\n        return self.x",
         "a = A(3)\nassert a.x == 3 and len(a) == 3\na.x = 4\nassert len(a) == 4\nassert isinstance(str(a), str)"),
        ("class S:\n    def add(self, a, *, b=1):\n        return a + b", "assert S().add(1, b=2) == 3"),
        ("def f(n):\n    return n and 1 + f(n - 1)\nimport sys\nsys.setrecursionlimit(10000)", "assert f(5000)"),
        ("import threading\nout = []\nt = threading.Thread(target=out.append, args=(3,))\nt.start()\nt.join()",
         "assert out == [3]"),
        ("def f(a, b):\n    return a == b", "def check(candidate):\n    assert candidate(1, 1)\ncheck(f)"),
        ("import numpy as np\ndef f(x):\n    return np.array(x), np.float32(0.5), np.bool_(True)",
         "a, b, c = f([1, 2])\nassert list(a) == [1, 2] and (b, c) == (0.5, True)"),
        ("def f(x):\n    return range(x), bytearray(b'a')", "assert f(3) == (range(3), bytearray(b'a'))"),
        ("def f(x):\n    return sum(x)", "assert f(range(4)) == 6"),
        ("class N:\n    pass\ndef f(x):\n    return x", "n = N()\nassert f(n) == n and f([n]) == [n]"),
        ("def f(x):\n    return x\nif __name__ == '__main__':\n    print(f(int(input())))", "assert f(2) == 2"),
    ],
)  # fmt: skip
def test_right_programs_pass(program: str, test: str) -> None:
    assert is_right(program, test)


@pytest.mark.parametrize(
    ("program", "test"),
    [
        ("def f(x):\n    return x", "assert f(1) == 2"),
        ("def g(x):\n    return x", "assert f(1) == 1"),
        ("def f(x):\n    return [x]", "assert f(1) == (1,)"),
        ("def f(x):\n    return object()", "assert f(1) == f(1)"),
        ("def f(x):\n    return iter([x])", "assert f(1) == [1]"),
        ("def f(x) return x", "assert f(1) == 1"),
        ("import no_such_module\ndef f(x):\n    return x", "assert f(1) == 1"),
        ("def f(x):\n    return not x", "assert f(True)"),
        ("def f(g):\n    return g(1)", "assert f(lambda x: x) == 1"),
    ],
)
def test_wrong_programs_fail(program: str, test: str) -> None:
    assert not is_right(program, test)


@pytest.mark.parametrize(
    ("program", "given", "wanted", "passes"),
    [
        ("print(int(input()) + int(input()))", "1\n2\n", "3\n", True),
        ("import sys\nprint(*map(int, sys.stdin.read().split()), sep=' \\n')", "1 2", "1\n2", True),
        ("import sys\nfor line in sys.stdin: sys.stdout.write(line)", "ü\n" * 100_000, "ü\n" * 100_000, True),
        ("print(open(0).read())", "text", "text", True),
        ("def main():\n    print(input())\nif __name__ == '__main__':\n    main()", "a", "a", True),
        ("print('3')\nraise SystemExit", "", "3", True),
        ("print('3')\nexit()", "", "3", True),
        ("print('3')\nquit(1)", "", "3", False),
        ("print('3')\nraise ValueError", "", "3", False),
        ("print('3')\nraise SystemExit(1)", "", "3", False),
        ("print('4')", "", "3", False),
        ("print(' 3')", "", "3", False),
        ("print('3\\n4')", "", "3", False),
        ("pass", "", "3", False),
        ("import threading as t\nt.stack_size(1 << 27)\nt.Thread(target=print, args=(3,)).start()", "", "3", True),
        ("import heapq, bisect, itertools, functools, math, re, collections, decimal, random\nprint(3)", "", "3", True),
    ],
)  # fmt: skip
def test_programs_that_read_and_print(program: str, given: str, wanted: str, passes: bool) -> None:
    assert score([{"input": given, "output": wanted}], fenced(program)).is_correct == passes


@pytest.mark.slow
def test_rewards() -> None:
    half = fenced("def to_kelvin(x):\n    return 273")
    right = fenced("def to_kelvin(x):\n    return x + 273")
    assert score(TEMPERATURE, right) == Score(1.0, is_correct=True, scorer_error=False)
    assert score(TEMPERATURE, half) == Score(0.0, is_correct=False, scorer_error=False)
    assert score(TEMPERATURE, half, binary_reward=False) == Score(0.5, is_correct=False, scorer_error=False)
    assert score(TEMPERATURE, right, binary_reward=False) == Score(1.0, is_correct=True, scorer_error=False)
    assert score(TEMPERATURE, "no program") == Score(0.0, is_correct=False, scorer_error=False)
    thought = f"<think>{right}</think>{half}"
    assert score(TEMPERATURE, f"{half}<think>{right}</think>").reward == 0
    assert score(TEMPERATURE, thought).reward == 0
    assert score(TEMPERATURE, f"{half}<think>{right}</think>", thinking_tags=None).reward == 1


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("```python\na\n```", "a\n"),
        ("```python\na\n```\n```Python \nb\n\n```", "b\n\n"),
        ("```python\na\n```\n```text\nb\n```", "a\n"),
        ("```python\na\n```\n```\nb\n```\nmore", "a\n"),
        ("```\na\n```\n```python\nb\n```", "b\n"),
        ("```python\na", None),
        ("```python\na\n```\n```python\nb", "a\n"),
        ("  ```python\n  a\n  ```", "a\n"),
        ("```python\n```", ""),
        ("a ```python\na\n```", None),
        ("a", None),
        ("```python\n" * 100_000, None),
    ],
)
def test_the_last_block_of_python_is_the_program(response: str, program: str | None) -> None:
    assert last_program(response) == program


def test_a_program_that_cannot_be_isolated_ends_the_run_and_never_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    limits = code_processes.Limits(5.0, 1 << 30, is_isolated=True)
    without = "import nemo_rl_offload.specs.sandbox as box; box._LANDLOCK_CREATE_RULESET = 9999; "
    code = code_processes._CODE.replace("main(", f"{without}main(")
    monkeypatch.setattr(code_processes, "_CODE", code)
    mark = tmp_path / "ran"
    with pytest.raises(WorkerError, match=r"env\.code_tests: .* not be isolated or limited: .*not impl"):
        code_processes.prints(f"open({str(mark)!r}, 'w')", "", "", limits)
    with pytest.raises(WorkerError, match="could not be isolated"):
        code_processes.passes(f"open({str(mark)!r}, 'w')", "assert True", limits)
    with pytest.raises(ConfigError, match="could not be isolated"):
        environment.__wrapped__()
    assert not mark.exists()


def test_too_little_memory_for_python_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"memory_limit"):
        environment(program_memory="1MiB")


@pytest.mark.parametrize(
    "test",
    [
        {"code": "def check(candidate):\n    assert candidate(1) == 1"},
        {"code": "def test_f():\n    assert f(1) == 1"},
        {"code": "if __name__ == '__main__':\n    assert f(1) == 1"},
        {"code": "try:\n    assert f(1) == 1\nexcept Exception:\n    pass"},
        {"code": "assert True"},
        {"input": "1", "output": ""},
    ],
)
def test_a_test_that_nothing_fails_is_an_error_of_the_record(test: Mapping[str, str]) -> None:
    with pytest.raises(ValueError, match="passes without a program"):
        score([test], fenced("def f(x):\n    return 2"))


@pytest.mark.parametrize("opening", ["```python", "```Python3", "```py", "```python title=a.py", "  ```python"])
def test_ways_to_begin_a_block(opening: str) -> None:
    indent = opening[: -len(opening.lstrip())]
    lines = [opening, f"{indent}def f(x):", f"{indent}    return x", f"{indent}```"]
    assert score([{"code": "assert f(1) == 1"}], "\n".join(lines)).is_correct
