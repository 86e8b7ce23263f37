"""Who writes files: whatever lands in a run directory goes by `runs/plain_files.py`, which follows no link."""

import ast
from collections import Counter
from collections.abc import Iterator

from nemo_rl_offload.config.loader import PROJECT_ROOT

PACKAGE = PROJECT_ROOT / "nemo_rl_offload"
TREES = {str(path.relative_to(PACKAGE)): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
ALLOWED = {
    ("specs/plain_file.py", "os.open"): 1,
    ("runs/plain_files.py", "os.open"): 2,
    ("runs/plain_files.py", "open"): 3,  # the descriptors that `open_plain_file` returns
    ("runs/output.py", "write_text"): 1,  # to a device or a pipe that a user names
    ("cli/command_line.py", "os.open"): 1,  # the null device
    ("cli/outlive.py", "os.open"): 1,  # the null device
    ("environments/process.py", "open"): 1,  # the null device
    ("environments/worker.py", "os.open"): 1,  # /proc
    ("environments/code_child.py", "open"): 2,  # pipes
    ("specs/sandbox.py", "os.open"): 1,  # a path, for the kernel's rules
    ("adapters/torch_modules.py", "open"): 1,  # a region of the engine
    # For reading alone:
    ("runs/manifest.py", "os.open"): 1,
    ("megatron/checkpoint/contents.py", "open"): 1,
    # In a folder that only the user can enter:
    ("cluster/private_ray.py", "os.open"): 1,
    # A folder that the writer has just made, which no other has:
    ("megatron/build/export_files.py", "copyfile"): 2,
    ("megatron/build/export_files.py", "write_text"): 2,
    # For tests and examples, not for runs:
    ("data/tokenizer.py", "write_text"): 1,
}
"""By file and function: how many calls."""
WRITERS = {"write_text", "write_bytes", "touch", "symlink_to", "hardlink_to", "copyfile", "copy", "copy2", "copytree"}
MODULES = {"os", "shutil"}


def writes(tree: ast.AST) -> Iterator[str]:
    """Functions that are called to write a file without looking what stands there."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = node.func
        if isinstance(called, ast.Name) and called.id == "open":
            if mode_of(node.args[1:2], node) != "r":
                yield "open"
        elif isinstance(called, ast.Attribute) and called.attr == "open":
            if isinstance(called.value, ast.Name) and called.value.id == "os":
                yield "os.open"
            elif mode_of(node.args[:1], node) != "r":
                yield "open"
        elif isinstance(called, ast.Attribute) and called.attr in WRITERS:
            is_of_module = isinstance(called.value, ast.Name) and called.value.id in MODULES
            if called.attr not in ("copy", "copy2") or is_of_module:
                yield called.attr


def mode_of(arguments: list[ast.expr], call: ast.Call) -> str:
    """`"r"` for reading alone."""
    mode = next((word.value for word in call.keywords if word.arg == "mode"), arguments[0] if arguments else None)
    if mode is None:
        return "r"
    is_reading = isinstance(mode, ast.Constant) and isinstance(mode.value, str) and not set(mode.value) & set("wax+")
    return "r" if is_reading else "w"


def test_files_are_written_by_one_module() -> None:
    found: Counter[tuple[str, str]] = Counter()
    for path, tree in TREES.items():
        for function in writes(tree):
            found[path, function] += 1
    assert found == ALLOWED


CLOCKS = {
    "observability/logger.py": 2,  # the time of day in a record, and in the name of TensorBoard's file
    "observability/step_profile.py": 1,  # where the phases stand in a profiler's trace
    "cluster/worker_group.py": 2,  # the order of failures on several nodes
    "cluster/private_ray.py": 2,  # how old a folder is that a killed run has left
    "observability/page_server.py": 1,  # whether a folder is the same as before
    "specs/chat_template.py": 1,  # what a template asks for
    "config/tokenizer_files.py": 2,  # whether a file is the same as before
}
"""By file: how often the time of day, or a file's time, is asked for."""


def test_durations_and_orders_do_not_follow_the_time_of_day() -> None:
    clocks = {("time", "time"), ("time", "time_ns"), ("datetime", "now"), ("datetime", "utcnow"), ("date", "today")}
    of_files = {"st_mtime", "st_mtime_ns", "st_ctime", "st_ctime_ns", "getmtime", "getctime"}
    found: Counter[str] = Counter()
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                of = node.value.id if isinstance(node.value, ast.Name) else ""
                found[path] += (of, node.attr) in clocks or node.attr in of_files
    assert {path: number for path, number in found.items() if number} == CLOCKS
