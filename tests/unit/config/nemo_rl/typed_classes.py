"""NeMo-RL's typed configuration from its sources, without an import of its package, which needs its own environment.

Of a class of keys its annotated names and defaults are taken, and whatever these name: constants, unions, and classes
of other files of the package. What comes from elsewhere, as a type of torch's, is `Any`.
"""

import ast
import builtins
import importlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

FROM_OUTSIDE = ("typing", "typing_extensions", "pydantic", "annotated_types", "enum", "collections.abc", "dataclasses")


@cache
def find(source: Path, module: str, name: str) -> Any:
    """What a module of the checkout `source` calls so."""
    match _statements(source, module).get(name):
        case ast.ImportFrom(module=str(origin), names=[ast.alias(name=theirs), *_]) if _file(source, origin):
            return find(source, origin, theirs)
        case ast.ImportFrom(module=str(origin), names=[ast.alias(name=theirs), *_]) if origin in FROM_OUTSIDE:
            return getattr(importlib.import_module(origin), theirs)
        case ast.Import(names=[ast.alias(name="os" as theirs)]):
            return importlib.import_module(theirs)
        case ast.ClassDef() | ast.Assign() | ast.AnnAssign() as node:
            node = _Unquoted().visit(node)
            names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and each.id != name}
            known = {"__name__": module} | {each: find(source, module, each) for each in names}
            exec(compile(ast.fix_missing_locations(ast.Module([node], [])), module, "exec"), known)
            return known[name]
    return getattr(builtins, name, Any)


class _Unquoted(ast.NodeTransformer):
    """Types that are written as text become what the text says."""

    def visit_keyword(self, node: ast.keyword) -> ast.AST:
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.annotation = self.visit(node.annotation)
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        return self.generic_visit(node) if isinstance(node.value, ast.Subscript) else node

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        is_of_values = isinstance(node.value, ast.Name) and node.value.id in ("Literal", "Annotated")
        return node if is_of_values else self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        return ast.parse(node.value, mode="eval").body if isinstance(node.value, str) else node


def _file(source: Path, module: str) -> Path | None:
    path = source.joinpath(*module.split("."))
    files = (path / "__init__.py", path.with_suffix(".py"))
    return next((file for file in files if module.startswith("nemo_rl") and file.is_file()), None)


@cache
def _statements(source: Path, module: str) -> Mapping[str, ast.stmt]:
    """What defines each name; of classes what says their keys."""
    found: dict[str, ast.stmt] = {}
    file = _file(source, module)
    assert file, module
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        match node:
            case ast.ImportFrom(module=origin, names=aliases):
                found |= {alias.asname or alias.name: ast.ImportFrom(origin, [alias], 0) for alias in aliases}
            case ast.Import(names=[ast.alias(name=name)]):
                found[name] = node
            case ast.ClassDef(name=name):
                node.body = [each for each in node.body if isinstance(each, ast.AnnAssign)] or [ast.Pass()]
                node.decorator_list = []
                found[name] = node
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                found[name] = node
    return found
