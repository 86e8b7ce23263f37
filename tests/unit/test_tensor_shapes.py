"""Public functions say what shapes their tensors have: in a suffix of the name (`ids_BS`), or in brackets in the
docstring (`ids` int64 [B, S]) of the function or, for a method, of its class; "0-dim" and "any shape" count too.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "nemo_rl_offload"
PARTS = ("megatron", "losses", "batching", "paged_stash")

SUFFIX = re.compile(r"_[A-Z][A-Z0-9]*$")
SHAPE = re.compile(r"\[[^\[\]]+\]|0-dim|any shape")
NO_TENSORS = {"Mapping", "dict", "Callable"}
"""What holds tensors of many shapes, or none."""


def is_tensor(annotation: ast.expr | None) -> bool:
    """Whether an annotation is of one tensor, or of several of one kind."""
    match annotation:
        case ast.Constant(value=str(text)):
            return is_tensor(ast.parse(text, mode="eval").body)
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name == "Tensor"
        case ast.BinOp(left=left, right=right):
            return is_tensor(left) or is_tensor(right)
        case ast.Subscript(value=ast.Name(id=name), slice=inner):
            return name not in NO_TENSORS and is_tensor(inner)
        case ast.Tuple(elts=inner):
            return any(map(is_tensor, inner))
    return False


def public_functions(tree: ast.Module) -> Iterator[tuple[ast.FunctionDef, str]]:
    """Yield the functions, and the methods of public classes, with what their docstrings say."""
    for node in tree.body:
        members = node.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_") else [node]
        of_class = ast.get_docstring(node) or "" if isinstance(node, ast.ClassDef) else ""
        for member in members:
            if isinstance(member, ast.FunctionDef) and (member.name.startswith("__") or member.name[0] != "_"):
                yield member, f"{of_class} {ast.get_docstring(member) or ''}"


def without_shapes(root: Path) -> list[str]:
    """Return file, function and parameters of what says nothing of its tensors' shapes."""
    found = []
    for path in sorted(path for part in PARTS for path in (root / part).rglob("*.py")):
        for function, text in public_functions(ast.parse(path.read_text(encoding="utf-8"))):
            args = function.args
            given = [*args.posonlyargs, *args.args, *args.kwonlyargs, *([args.vararg] if args.vararg else [])]
            names = [each.arg for each in given if is_tensor(each.annotation) and not SUFFIX.search(each.arg)]
            if names and not SHAPE.search(text):
                found.append(f"{path.relative_to(root)}: {function.name}({', '.join(names)})")
    return found


def test_shapes_are_named() -> None:
    assert sum(1 for part in PARTS for _ in (PACKAGE / part).rglob("*.py")) > 30
    assert without_shapes(PACKAGE) == []


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def f(x: Tensor): ...", "f(x)"),
        ("def f(x: torch.Tensor | None, n: int): ...", "f(x)"),
        ("def f(x_BS: Tensor, *rest: Tensor): ...", "f(rest)"),
        ("def f(xs: Sequence[Tensor], *, y: 'Tensor'): ...", "f(xs, y)"),
        ("class A:\n    '''Of numbers.'''\n    def __call__(self, x: Tensor): ...", "__call__(x)"),
        ("def f(x_BS: Tensor): ...", None),
        ("def f(x: Tensor):\n    '''`x` [B, S].'''", None),
        ("class A:\n    '''[B, S] in and out.'''\n    def forward(self, x: Tensor): ...", None),
        ("def f(batch: Mapping[str, Tensor], g: Callable[[Tensor], None]): ...", None),
        ("def _f(x: Tensor): ...", None),
    ],
)
def test_a_planted_violation_is_found(source: str, expected: str | None, tmp_path: Path) -> None:
    (tmp_path / "losses").mkdir()
    (tmp_path / "losses/one.py").write_text(source)
    assert without_shapes(tmp_path) == ([] if expected is None else [f"losses/one.py: {expected}"])
