"""Keeps the layers: which part of the package may import which, and what it must never import.

Every import statement counts, also inside functions and under `TYPE_CHECKING`. Only `cli`, which imports
lazily whatever a command needs, answers for its module level alone.
"""

import ast
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = "nemo_rl_offload"
PROJECT = Path(__file__).resolve().parents[2]

LAYERS = (
    *("errors", "units", "specs", "config", "offload", "adapters", "paged_stash", "planner", "losses", "batching"),
    *("runs", "observability", "data", "environments", "megatron", "cluster", "generation", "policy", "algorithms"),
    *("bench", "cli"),
)
"""Each imports only from those before it."""
ENGINE_MAY_IMPORT = {"errors", "units"}
"""What the engine, `offload`, takes of this project: it can be lifted out with these two files."""

NEVER = {
    "specs": {"torch", "megatron"},
    "config": {"torch", "megatron"},
    "planner": {"torch", "megatron"},
    "offload": {"megatron"},
    "runs": {"torch", "megatron"},
    "observability": {"megatron"},
    "losses": {"megatron"},
    "batching": {"megatron"},
}
WITH_RAY = {"cluster", "policy"}


def modules_of(root: Path) -> dict[str, Path]:
    """Return dotted name -> file of all modules below the package's folder."""
    files = {path: path.relative_to(root.parent).with_suffix("").parts for path in root.rglob("*.py")}
    return {".".join(parts).removesuffix(".__init__"): path for path, parts in files.items()}


def statements(path: Path) -> Iterator[ast.stmt]:
    """Yield the import statements that count."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree) if "cli" not in path.parts else tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node


def imports_of(name: str, modules: dict[str, Path]) -> set[str]:
    """Return the dotted names that a module imports: submodules where they exist, else their package."""
    package = name if modules[name].name == "__init__.py" else name.rpartition(".")[0]
    found = set()
    for node in statements(modules[name]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            for alias in node.names:
                full = f"{base}.{alias.name}"
                found.add(full if full in modules or base == PACKAGE else base)
    return found


def layer_violations(root: Path) -> list[str]:
    modules = modules_of(root)
    return [
        f"{name} imports {target}"
        for name in sorted(modules)
        for target in sorted(imports_of(name, modules))
        if not is_allowed(name, target)
    ]


def is_allowed(name: str, target: str) -> bool:
    layer = name.split(".")[1] if "." in name else ""
    top, _, rest = target.partition(".")
    if top != PACKAGE:
        is_foreign = top not in sys.stdlib_module_names
        needs_ray = top == "ray" and layer not in WITH_RAY
        return not ((is_foreign and layer in ("", "errors")) or needs_ray or top in NEVER.get(layer, ()))
    other = rest.split(".")[0]
    if layer not in LAYERS or other not in LAYERS:
        return layer in LAYERS and (not rest or other.startswith("__"))
    if layer == "offload" and other != layer:
        return other in ENGINE_MAY_IMPORT
    return other == layer or LAYERS.index(other) < LAYERS.index(layer)


def find_cycle(root: Path) -> list[str]:
    modules = modules_of(root)
    graph = {name: (imports_of(name, modules) & modules.keys()) - {name} for name in modules}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def eager_packages(root: Path) -> list[str]:
    """Return the `__init__` files that import more than the standard library when they are imported."""
    found = []
    for path in sorted(root.rglob("__init__.py")):
        body = ast.parse(path.read_text(encoding="utf-8")).body
        for node in body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [PACKAGE if node.level else str(node.module)]
            if any(name.split(".")[0] not in sys.stdlib_module_names for name in names):
                found.append(str(path.relative_to(root)))
    return found


def test_layers_are_kept() -> None:
    assert len(modules_of(PROJECT / PACKAGE)) > 5
    assert layer_violations(PROJECT / PACKAGE) == []


def test_every_part_of_the_package_has_a_layer() -> None:
    parts = {name.split(".")[1] for name in modules_of(PROJECT / PACKAGE) if "." in name}
    assert parts <= set(LAYERS)


def test_no_import_cycle() -> None:
    assert find_cycle(PROJECT / PACKAGE) == []


def test_packages_import_lazily() -> None:
    assert eager_packages(PROJECT / PACKAGE) == []


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A small package that keeps all rules."""
    for layer in ("specs", "config", "offload", "planner", "cluster", "policy", "cli"):
        (tmp_path / PACKAGE / layer).mkdir(parents=True)
        (tmp_path / PACKAGE / layer / "__init__.py").write_text("from importlib import import_module\n")
    (tmp_path / PACKAGE / "__init__.py").write_text("")
    (tmp_path / PACKAGE / "errors.py").write_text("import difflib\n")
    (tmp_path / PACKAGE / "config" / "a.py").write_text(f"import yaml\nfrom {PACKAGE}.errors import E\n")
    (tmp_path / PACKAGE / "policy" / "p.py").write_text(f"import ray\nimport {PACKAGE}.config.a\n")
    (tmp_path / PACKAGE / "cli" / "main.py").write_text("def main():\n    import ray\n")
    return tmp_path / PACKAGE


def test_the_sound_package_passes(package: Path) -> None:
    assert layer_violations(package) == []
    assert find_cycle(package) == []
    assert eager_packages(package) == []


@pytest.mark.parametrize(
    ("file", "line", "imported"),
    [
        ("errors.py", "import yaml", "yaml"),
        ("errors.py", f"from {PACKAGE} import config", f"{PACKAGE}.config"),
        ("config/b.py", "import torch", "torch"),
        ("config/b.py", "from torch import nn", "torch"),
        ("config/b.py", "import torch.nn as nn", "torch.nn"),
        ("config/b.py", "def f():\n    import torch", "torch"),
        ("config/b.py", "if TYPE_CHECKING:\n    import ray", "ray"),
        ("config/b.py", f"from {PACKAGE}.policy.p import x", f"{PACKAGE}.policy.p"),
        ("config/b.py", f"from {PACKAGE}.policy import p", f"{PACKAGE}.policy.p"),
        ("config/b.py", f"from {PACKAGE} import policy", f"{PACKAGE}.policy"),
        ("config/b.py", f"from {PACKAGE} import reexported", f"{PACKAGE}.reexported"),
        ("config/b.py", f"import {PACKAGE}.policy.p", f"{PACKAGE}.policy.p"),
        ("config/b.py", "from ..policy import p", f"{PACKAGE}.policy.p"),
        ("config/b.py", "from .. import policy", f"{PACKAGE}.policy"),
        ("offload/b.py", f"from {PACKAGE}.config.a import x", f"{PACKAGE}.config.a"),
        ("offload/b.py", f"from {PACKAGE}.specs import x", f"{PACKAGE}.specs"),
        ("planner/b.py", "import torch", "torch"),
        ("specs/b.py", f"from {PACKAGE}.config.a import x", f"{PACKAGE}.config.a"),
        ("offload/b.py", "from megatron.core import x", "megatron.core"),
        ("offload/b.py", f"from {PACKAGE}.megatron.setup import x", f"{PACKAGE}.megatron.setup"),
        ("algorithms/b.py", "import ray", "ray"),
        ("cli/main.py", "import ray", "ray"),
        ("elsewhere.py", f"from {PACKAGE}.errors import E", f"{PACKAGE}.errors"),
        ("__init__.py", "import torch", "torch"),
    ],
)
def test_a_planted_violation_is_found(package: Path, file: str, line: str, imported: str) -> None:
    path = package / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"{line}\n")
    module = f"{PACKAGE}.{file.removesuffix('.py').replace('/', '.')}".removesuffix(".__init__")
    assert layer_violations(package) == [f"{module} imports {imported}"]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (f"from {PACKAGE}.offload.y import a", "from .x import b"),
        ("from . import y", f"def f():\n    from {PACKAGE}.offload import x"),
    ],
)
def test_a_planted_cycle_is_found(package: Path, first: str, second: str) -> None:
    (package / "offload" / "x.py").write_text(f"{first}\n")
    (package / "offload" / "y.py").write_text(f"{second}\n")
    assert layer_violations(package) == []
    assert set(find_cycle(package)) == {f"{PACKAGE}.offload.x", f"{PACKAGE}.offload.y"}


@pytest.mark.parametrize("line", ["from .x import b", f"from {PACKAGE}.offload import x", "import torch"])
def test_a_planted_eager_package_is_found(package: Path, line: str) -> None:
    (package / "offload" / "x.py").write_text("")
    (package / "offload" / "__init__.py").write_text(f"{line}\n")
    assert eager_packages(package) == ["offload/__init__.py"]
