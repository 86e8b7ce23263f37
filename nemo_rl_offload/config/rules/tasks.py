"""Rules about who sets tasks and scores answers: reasoning-gym's tasks, and functions of the user's.

Their sources are read, not imported: reasoning-gym takes seconds to import, and a user's module may do anything. The
limit: what a source does not say plainly, such as names that are made while it runs, is left to the run.
"""

import ast
import importlib.machinery
import os
import re
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from nemo_rl_offload.config.rules.rule import Get, Rule, algorithm_spec
from nemo_rl_offload.config.rules.runs import takes_problems
from nemo_rl_offload.errors import nearest

FUNCTION, TASK_PARAMS = "env.function", "env.reasoning_gym.params"
GIVEN_TO_ALL = ("seed", "size")
"""Parameters of every task that the section `data` gives."""


def _task(get: Get) -> Iterator[str]:
    task = get("env.reasoning_gym.task")
    names = task_sources()
    if task is None and takes_problems(get):
        yield "env.reasoning_gym.task: missing value. Give one: env.reasoning_gym.task=..."
    elif task is not None and task not in names:
        hint = nearest(task, names) or f" Some of them: {', '.join(sorted(names)[:5])}."
        yield f"env.reasoning_gym.task: '{task}' is none of reasoning-gym's {len(names)} tasks.{hint}"


def _task_params(get: Get) -> Iterator[str]:
    task = get("env.reasoning_gym.task")
    if not takes_problems(get) or task not in task_sources():
        return
    allowed = task_params(task)
    for name in get(TASK_PARAMS):
        if allowed and name not in allowed:
            yield (
                f"{TASK_PARAMS}.{name}: not a parameter of task '{task}'.{nearest(name, allowed)} It has: "
                f"{', '.join(allowed)}. To remove it: ~{TASK_PARAMS}.{name}"
            )


@cache
def task_sources() -> dict[str, Path]:
    """The file of each of reasoning-gym's data sets, by the name of its task."""
    package = find_spec("reasoning_gym")
    assert package is not None
    assert package.submodule_search_locations
    declared = re.compile(r'^(?:DATASET_NAME\s*=|register_dataset\()\s*"(\w+)"', re.MULTILINE)
    sources = Path(package.submodule_search_locations[0]).rglob("*.py")
    return {name: source for source in sources for name in declared.findall(source.read_text(encoding="utf-8"))}


@cache
def task_params(task: str) -> tuple[str, ...]:
    """The parameters of a task, of the class of settings that it is registered with; none where that is not plain."""
    tree = ast.parse(task_sources()[task].read_text(encoding="utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and len(node.args) > 2]
    of_task = [call.args[2] for call in calls if getattr(call.func, "id", "") == "register_dataset"]
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    found = [classes[name.id] for name in of_task if isinstance(name, ast.Name) and name.id in classes]
    if len(of_task) != 1 or len(found) != 1 or found[0].bases:
        return ()
    fields = [node.target for node in found[0].body if isinstance(node, ast.AnnAssign)]
    names = [field.id for field in fields if isinstance(field, ast.Name)]
    return tuple(name for name in names if name not in GIVEN_TO_ALL)


def _function(get: Get) -> Iterator[str]:
    path = get(f"{FUNCTION}.path")
    if path is not None and not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*", path):
        yield f"{FUNCTION}.path: '{path}' names no function. Write it as package.module:name."
    elif path is None and _is_scored_by_function(get):
        yield f"{FUNCTION}.path: missing value. Give one: env.function.path=package.module:name"


def _is_scored_by_function(get: Get) -> bool:
    return algorithm_spec(get).generates and f"env.{get('data.env_name')}" == FUNCTION


def _function_is_here(get: Get) -> Iterator[str]:
    path = get(f"{FUNCTION}.path")
    if not _is_scored_by_function(get) or path is None or any(_function(get)):
        return
    module, _, name = path.partition(":")
    found = _find(module)
    if isinstance(found, str):
        yield f"{FUNCTION}.path: {found}"
        return
    if found is None or not found.origin or not found.origin.endswith(".py"):
        return
    try:
        tree = ast.parse(Path(found.origin).read_bytes())
    except SyntaxError as error:
        yield f"{FUNCTION}.path: {found.origin}:{error.lineno}: {error.msg}. Mend it."
        return
    names = _names(tree)
    if names is not None and name not in names:
        yield f"{FUNCTION}.path: {module} ({found.origin}) has no function '{name}'.{nearest(name, names)}"
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == name and not node.decorator_list:
            yield from _params(node, get)


def _params(function: ast.FunctionDef, get: Get) -> Iterator[str]:
    """What `env.function.params` has that the function does not take, and lacks that it needs."""
    arguments = function.args
    positional = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    needed = positional[2 : len(positional) - len(arguments.defaults)]
    allowed = positional[2:] + [argument.arg for argument in arguments.kwonlyargs]
    needed += [
        argument.arg
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if default is None
    ]
    given, path = get(f"{FUNCTION}.params"), f"{FUNCTION}.params"
    for name in given:
        if name not in allowed and arguments.kwarg is None:
            takes = f"It takes: {', '.join(allowed)}." if allowed else "It takes none."
            yield f"{path}.{name}: not a parameter of {function.name}.{nearest(name, allowed)} {takes}"
    for name in needed:
        if name not in given:
            yield f"{path}.{name}: missing value: {function.name} has no default for it. Give one: +{path}.{name}=..."


def _find(module: str) -> importlib.machinery.ModuleSpec | str | None:
    """Where a module is, without an import of its packages; None where that is not plain, else why there is none."""
    if module in sys.modules:
        return None
    folders: Sequence[str] = [*sys.path, os.getcwd()]
    spec: importlib.machinery.ModuleSpec | None = None
    for depth, part in enumerate(module.split(".")):
        package = spec
        spec = find_spec(part) if depth == 0 and part not in sys.modules else None  # editable installs have finders
        spec = spec or importlib.machinery.PathFinder.find_spec(part, folders)
        if spec is None and package is not None and _makes_modules(package):
            return None
        if spec is None:
            there = [entry.stem for folder in folders if Path(folder).is_dir() for entry in Path(folder).iterdir()]
            return (
                f"there is no module '{module}'.{nearest(part, there)} Modules are looked for in {os.getcwd()} and in "
                "PYTHONPATH."
            )
        folders = list(spec.submodule_search_locations or ())
    return spec


def _makes_modules(package: importlib.machinery.ModuleSpec) -> bool:
    """Whether a package may have modules that are not files in its folders."""
    origin = package.origin or ""
    text = Path(origin).read_text(encoding="utf-8", errors="replace") if origin.endswith(".py") else ""
    return "__path__" in text or "sys.modules" in text


def _names(tree: ast.Module) -> set[str] | None:
    """What a module defines at its top level; None where other code may add to it."""
    found: set[str] = set()
    for node in tree.body:
        match node:
            case ast.FunctionDef() | ast.ClassDef() | ast.AsyncFunctionDef():
                found.add(node.name)
            case ast.Assign() | ast.AnnAssign():
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found |= {inner.id for target in targets for inner in ast.walk(target) if isinstance(inner, ast.Name)}
            case ast.Import() | ast.ImportFrom():
                found |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
            case ast.Expr(value=ast.Constant()):
                pass
            case _:
                return None
    return None if found & {"*", "__getattr__"} else found


TASK_RULES: tuple[Rule, ...] = (_task, _task_params, _function)
TASK_RULES_OF_THIS_MACHINE: tuple[Rule, ...] = (_function_is_here,)
