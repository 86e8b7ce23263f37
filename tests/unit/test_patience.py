"""No test fails because the machine is busy: what is waited for may take as long as `patience.PATIENCE_S`.

Only the usual forms of short waits are found.
"""

import ast
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
from patience import PATIENCE_S, OverdueError, eventually, within_patience

from nemo_rl_offload.config.loader import PROJECT_ROOT

TESTS = PROJECT_ROOT / "tests"
WAITING = {"wait", "join", "poll", "result", "acquire", "communicate", "alarm"}
CLOCKS = {"monotonic", "perf_counter", "process_time", "thread_time"}
LOOK_S = 1.0
"""To see that something has not happened yet."""
ALLOWED = {
    "unit/generation/test_chat_server.py",  # whoever waits is let go before its request would end by itself
    "unit/algorithms/test_loop.py",  # times are within the time that all took
}
"""Files that may compare times of a clock."""


def is_short(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float) and LOOK_S < node.value < PATIENCE_S


def reads_clock(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CLOCKS


def impatient(tree: ast.AST) -> Iterator[int]:
    """Lines that wait for a number of seconds which a busy machine may need."""
    for node in ast.walk(tree):
        waited: list[ast.expr] = []
        if isinstance(node, ast.Call):
            waited = [each.value for each in node.keywords if each.arg == "timeout"]
            if isinstance(node.func, ast.Attribute) and node.func.attr in WAITING and len(node.args) == 1:
                waited += node.args
        elif isinstance(node, ast.BinOp) and reads_clock(node.left):
            waited = [node.right]
        if any(map(is_short, waited)):
            yield node.lineno


def timed(tree: ast.AST) -> Iterator[int]:
    """Lines that assert how long something took."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert) and any(map(reads_clock, ast.walk(node.test))):
            yield node.lineno


def test_no_test_depends_on_how_fast_the_machine_is() -> None:
    found = []
    for path in sorted(TESTS.rglob("*.py")):
        tree, name = ast.parse(path.read_text()), str(path.relative_to(TESTS))
        lines = [*impatient(tree), *(timed(tree) if name not in ALLOWED else ())]
        found += [f"{name}:{line}" for line in lines]
    assert found == []


@pytest.mark.parametrize(
    "line",
    [
        "process.wait(60)",
        "assert thread.join(30.0) is None",
        "subprocess.run(words, timeout=300)",
        "deadline_s = time.monotonic() + 150",
        "assert time.monotonic() - start_s < 10",
        "assert pipe.poll(240)",
        "signal.alarm(20)",
        "assert time.process_time() - start_s < 2",
    ],
)
def test_lines_that_would(line: str) -> None:
    tree = ast.parse(line)
    assert [*impatient(tree), *timed(tree)] == [1]


def test_what_never_holds_is_told_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("patience.PATIENCE_S", 0.05)
    looks = iter([0, [], 3])
    assert eventually(lambda: next(looks), period_s=0.001)
    assert not eventually(list, period_s=0.001)


def test_what_hangs_is_ended_whatever_it_catches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("patience.PATIENCE_S", 0.05)

    def hangs() -> None:
        while True:
            with suppress(Exception):
                time.sleep(0.01)

    with within_patience(), pytest.raises(OverdueError):
        hangs()
