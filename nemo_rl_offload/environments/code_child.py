"""What runs in a process for a model's program, or for tests of one: first its rights are given up, then it runs.

Three tasks. `standard_io`: the program reads its standard input and writes its standard output, which the parent
compares. `program`: the program runs and then answers what tests ask about it (`code_calls.py`). `tests`: these
tests, whose end without an exception is told by a pipe that the program's process never had.

The parent learns by a byte on another pipe that the rights are gone, and then begins to count time. Only the standard
library and this package's own small modules are imported, since a process starts for each test.
"""

import ast
import builtins
import ctypes
import importlib
import json
import os
import signal
import sys
from types import ModuleType
from typing import Any, TypedDict

from nemo_rl_offload.environments.code_calls import Ask, asking, serve
from nemo_rl_offload.specs import sandbox

PASSED = b"passed"
READY = b"+"
_PR_SET_PDEATHSIG = 1


class Job(TypedDict):
    """What a process is told."""

    task: str
    source: str
    """Of the program, or of the tests."""
    requests: int
    """Descriptors of pipes, of `program` and `tests` alone: what is asked,"""
    answers: int
    """and what is answered,"""
    verdict: int
    """and, of `tests` alone, for what came of them."""
    is_isolated: bool
    memory_bytes: int
    packages: list[str]
    """Folders of packages, which the program may import."""
    readable: list[str]
    """Further paths that can be read."""


def main(job: int, status: int, parent: int) -> None:
    """Run what the descriptor `job` says; on `status` it is told that the process is isolated, or why it is not."""
    with open(job, encoding="utf-8") as file:
        told: Job = json.load(file)
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        vars(builtins).update(exit=sys.exit, quit=sys.exit)  # which Python's `site` brings, and programs call
        sys.path[:] = [path for path in sys.path if path.startswith(sys.base_prefix)] + told["packages"]
        sandbox.limit(told["memory_bytes"])
        if told["is_isolated"]:
            sandbox.enter([*told["packages"], *told["readable"]])
        is_ready = True
    except (OSError, ValueError, MemoryError) as error:
        os.write(status, f"{type(error).__name__}: {error}".encode())
        is_ready = False
    if is_ready:
        os.write(status, READY)
    os.close(status)
    if is_ready:
        {"standard_io": _run_alone, "program": _run_program, "tests": _run_tests}[told["task"]](told)


def _run_alone(job: Job) -> None:
    _run("__main__", job["source"])


def _run_program(job: Job) -> None:
    with open(job["requests"], "rb") as requests, open(job["answers"], "wb") as answers:
        serve(requests, answers, _run("program", job["source"]))


def _run_tests(job: Job) -> None:
    with open(job["requests"], "wb") as requests, open(job["answers"], "rb") as answers:
        ask = asking(requests, answers, when_gone=lambda: os._exit(1))
        tree = ast.parse(job["source"], "tests.py")
        names = {"__name__": "tests", **_of_program(tree, ask)}
        exec(compile(tree, "tests.py", "exec"), names)  # noqa: S102 - in a process without rights
        os.write(job["verdict"], PASSED)


def _run(name: str, source: str) -> dict[str, Any]:
    """Run a program as a module of that name; return what it defines."""
    module = sys.modules[name] = ModuleType(name)
    exec(compile(source, f"{name}.py", "exec", dont_inherit=True), vars(module))  # noqa: S102 - that is its task
    return vars(module)


def _of_program(tests: ast.Module, ask: Ask) -> dict[str, Any]:
    """Which names in tests are the program's.

    Not those of builtins and of the standard library's modules, which a program could make say anything. A test that
    knows no other name than one builtin is about a function that is called so.
    """
    nodes = list(ast.walk(tests))
    read = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    own = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    dotted = {node.value.id for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)}
    of_builtins = read & vars(builtins).keys() if len(read) > 1 else set()
    found: dict[str, Any] = {}
    for name in sorted(read - own - of_builtins):
        if name in dotted and name in sys.stdlib_module_names:
            found[name] = importlib.import_module(name)
            continue
        try:
            found[name] = ask("name", name)
        except LookupError:  # which the test defines or imports itself, or misses
            continue
    return found
