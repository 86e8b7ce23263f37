"""A Jinja environment in which a template can neither run for ever nor fill the memory.

A chat template comes with a model's files. Jinja's sandbox keeps it from Python's insides, and no more: a hundred
nested loops, a text that is doubled in each of forty lines, `'%999999999d' % 1` or `10 ** 10 ** 8` hang, or take all
memory. So each rendering has an allowance, in characters. All that a template does is charged: each round of a loop and
each call, and each value that it makes, with all that is in it. What multiplies is computed before it is done, for one
operation in C can be too much, and nothing can stop that from within.

Rejected: a limit in seconds, by a signal (main thread only, and not within one operation) or by a thread that watches
(it cannot stop another one); and a process of its own, to be killed, with a message to and fro for each of millions of
renderings. An allowance in steps is also the same on a slow machine. The limit: what is charged is listed here by hand.
A filter of a later Jinja that multiplies in a new way is charged when it is done.

Where values are large because a conversation is, so is the allowance.
"""

import re
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, ValuesView
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from types import GeneratorType
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer
from markupsafe import EscapeFormatter, Markup

from nemo_rl_offload.errors import NemoRLOffloadError

MAX_TEMPLATE = 1 << 16
"""Characters of a template. Long ones have 20,000."""
STEP = 20
"""What a round of a loop, a call or a value costs, in characters."""
BASE, PER_CHARACTER = 2_000_000, 200
"""The allowance of a rendering, and what each character of the conversation adds to it."""
LARGEST_NUMBER = 100_000
"""That a filter is told, such as a width; also Jinja's own limit for `range`."""
_LARGEST_BITS = 10_000
_LARGEST_INDENT = 100
_WIDTHS = re.compile(r"\d+")
_COMPARING = frozenset(["in", "lower", "upper", "==", "eq", "equalto", "!=", "ne", "<", "lt", "lessthan", "<=", "le"])
_COMPARING |= {">", "gt", "greaterthan", ">=", "ge"}
"""Jinja's tests that go through a value."""
_WRITTEN = frozenset(["replace", "format", "%", "urlize", "striptags"])
"""Filters that write out what they are given, and `%`."""
_QUADRATIC = frozenset(["rfind", "rindex", "rsplit", "rpartition", "strip", "lstrip", "rstrip"])
"""Methods that may look at a text once for each character of what they look for."""


class RunawayTemplateError(NemoRLOffloadError):
    """A template does more than a conversation of this length can need."""

    def __init__(self) -> None:
        super().__init__(
            "policy.tokenizer.chat_template: the template runs too long, or makes too long a text, for the "
            "conversation that it is given. Mend it, or give another one."
        )


class _Allowance:
    def __init__(self, left: int) -> None:
        self.left = left

    def spend(self, amount: int) -> None:
        self.left -= amount
        if self.left < 0:
            raise RunawayTemplateError


_allowance: ContextVar[_Allowance | None] = ContextVar("allowance", default=None)


@contextmanager
def allowance_for(given: object) -> Iterator[None]:
    """Give a rendering of `given`, such as messages, its allowance. Raises RunawayTemplateError where it is spent."""
    token = _allowance.set(_Allowance(BASE + PER_CHARACTER * size_of(given, 1 << 40)))
    try:
        yield
    except (RecursionError, MemoryError) as error:
        raise RunawayTemplateError from error
    finally:
        _allowance.reset(token)


def size_of(value: object, most: int) -> int:
    """Characters of a value written out, about, and no more of it than `most`; what is not looked into costs a step."""
    total, waiting = 0, [value]
    while waiting and total <= most:
        each = waiting.pop()
        total += STEP
        if isinstance(each, str | bytes):
            total += len(each)
        elif isinstance(each, int):
            total += each.bit_length() // 3
        elif isinstance(each, list | tuple | set | frozenset | KeysView | ValuesView | ItemsView):
            waiting.extend(each)
        elif isinstance(each, Namespace):
            waiting.append(object.__getattribute__(each, "_Namespace__attrs"))
        elif isinstance(each, Mapping):
            waiting.extend(each)
            waiting.extend(each.values())
    return total


def _left() -> _Allowance:
    if (allowance := _allowance.get()) is None:  # Jinja would compute a constant while it compiles, and then does not
        raise RunawayTemplateError
    return allowance


def _spend(amount: int) -> None:
    _left().spend(amount)


def _charged[T](value: T) -> T:
    """A value, when it is paid for; a generator is, as it goes."""
    if isinstance(value, GeneratorType):
        return _paid(value)  # type: ignore[return-value]
    allowance = _left()
    allowance.spend(size_of(value, allowance.left))
    return value


def _paid(values: Iterator[Any]) -> Iterator[Any]:
    for value in values:
        yield _charged(value)


def _listed(value: Any) -> Any:
    """A value that can be counted, in place of one that is used up as it is read."""
    return list(value) if isinstance(value, Iterator) and not hasattr(value, "__len__") else value


def _looked_through(value: Any) -> int:
    """What it costs to search or compare a value in C, where nothing new is made."""
    return len(value) if isinstance(value, range) else size_of(value, STEP * (_left().left + 1)) // STEP


def _widths(text: str) -> int:
    return sum(int(digits[:12]) for digits in _WIDTHS.findall(text))


def _depth(value: Any) -> int:
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return 1 + max(map(_depth, inner), default=0)


class _Fields(SandboxedFormatter):
    """`str.format`, where each field is paid for before it is written: its value, then its width, wherever it is from.

    An attribute of a loop or a cycler may be long where the object itself is charged one step.
    """

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        field = super().get_field(field_name, args, kwargs)
        _charged(field[0])
        return field

    def format_field(self, value: Any, format_spec: str) -> Any:
        _spend(_widths(format_spec))
        return super().format_field(value, format_spec)


class _EscapedFields(_Fields, EscapeFormatter):
    pass


def _grows(name: str, value: Any, given: tuple[Any, ...]) -> int:
    """How long the result of a method or filter of text may be that is longer than what it is given."""
    numbers = [abs(each) for each in given if isinstance(each, int)]
    texts = [each for each in given if isinstance(each, str | bytes)]
    text = value if isinstance(value, str | bytes) else ""
    written = value.decode("latin-1") if isinstance(value, bytes) else str(value) if name in _WRITTEN else ""
    largest = max(numbers, default=0)
    if name == "replace" and len(given) > 1:
        old, new = (each.decode("latin-1") if isinstance(each, bytes) else str(each) for each in given[:2])
        return written.count(old) * len(new)
    if name in ("format", "%"):
        return (written.count("%") + 1) * (size_of(given, BASE) + largest) + _widths(written)
    if name == "urlize":
        words = written.split()
        return (len(words) + 1) * size_of(given, BASE) + sum(len(word) ** 2 for word in words) // STEP
    if name == "striptags":
        return written.count("<") * len(written) // STEP
    if name == "pprint":
        return size_of(value, BASE) * _depth(value)
    if name == "tojson":
        indent = max([0, *numbers, *map(len, texts)])
        if indent > _LARGEST_INDENT or any(map(callable, given)):
            raise RunawayTemplateError
        separators = sum(size_of(each, BASE) for each in given if not isinstance(each, int | str | bytes))
        return size_of(value, BASE) // STEP * (indent * _depth(value) + separators)
    if name in ("expandtabs", "indent", "wordwrap"):
        lines = len(text) if name == "wordwrap" or isinstance(text, bytes) else max(map(text.count, "\t\n"))
        return (lines + 1) * (largest + sum(map(len, texts)) + 8)
    if name == "join" and isinstance(value, str | bytes):  # a text's method; its items are charged as they are given
        return len(text) * (len(given[0]) if given and hasattr(given[0], "__len__") else 1)
    if name == "join":
        return size_of(given, BASE) * (len(value) if given and hasattr(value, "__len__") else 1)
    if name in ("center", "ljust", "rjust", "zfill", "to_bytes"):
        return largest
    if name == "translate":
        return len(text) * size_of(given, BASE)
    return 0


class _Charge(NodeTransformer):
    """Puts what charges into a template's tree."""

    def __init__(self, environment: "BoundedEnvironment") -> None:
        self._environment = environment

    def _call(self, name: str, arguments: list[Any], at: nodes.Node) -> nodes.Call:
        function = nodes.EnvironmentAttribute(name)
        call = nodes.Call(function, arguments, [], None, None)
        call.set_lineno(at.lineno, override=False)
        call.set_environment(self._environment)
        return call

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 - as Jinja calls them
        self.generic_visit(node)
        node.iter = self._call("iterated", [node.iter], node)
        round_ = nodes.ExprStmt(self._call("spend", [nodes.Const(STEP)], node), lineno=node.lineno)
        node.body.insert(0, round_)
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        operands: list[nodes.Compare | nodes.Operand] = [node, *node.ops]
        searches = any(each.op in ("in", "notin") for each in node.ops)
        if searches or not any(isinstance(each.expr, nodes.Const) for each in operands):
            for each in operands:
                each.expr = self._call("compared", [each.expr], node)
        return node

    def visit_Output(self, node: nodes.Output) -> Any:  # noqa: N802
        self.generic_visit(node)
        length = sum(len(each.data) for each in node.nodes if isinstance(each, nodes.TemplateData))
        if not length:
            return node
        text = nodes.ExprStmt(self._call("spend", [nodes.Const(length)], node), lineno=node.lineno)
        return [text, node]

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return self._call("concatenated", node.nodes, node)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return self._call("made", [node], node) if isinstance(node.arg, nodes.Slice) else node

    def visit_literal(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        return self._call("made", [node], node) if getattr(node, "ctx", "load") == "load" else node

    visit_List = visit_Tuple = visit_Dict = visit_literal  # noqa: N815


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox, with an allowance; templates are compiled without computing anything beforehand."""

    intercepted_binops = frozenset(["*", "**", "+", "%"])

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, optimized=False, finalize=_output)
        self.globals.pop("lipsum", None)
        self.bound_filters()

    def bound_filters(self) -> None:
        """Charge what filters do; again after another one was added."""
        self.filters = {name: _bounded_filter(name, function) for name, function in self.filters.items()}
        self.tests = {
            name: _bounded_test(function) if name in _COMPARING else function for name, function in self.tests.items()
        }

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Charge(self).visit(super()._parse(source, name, filename))
        return tree

    def spend(self, amount: int) -> None:
        _spend(amount)

    def iterated(self, values: Any) -> Any:
        _spend(len(values) if hasattr(values, "__len__") else STEP)
        return _paid(values) if isinstance(values, GeneratorType) else values

    def compared(self, value: Any) -> Any:
        _spend(_looked_through(value))
        return _paid(value) if isinstance(value, GeneratorType) else value

    def concatenated(self, *values: Any) -> str:
        for value in values:
            _charged(value)
        return "".join(map(str, values))

    def made(self, value: Any) -> Any:
        return _charged(value)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - as Jinja has it
        method = getattr(__obj, "__wrapped__", __obj)  # of str.format
        of = getattr(method, "__self__", None)
        _spend(STEP + len(args) + len(kwargs))
        if isinstance(of, range | list | tuple):
            _spend(_looked_through(of))
        if isinstance(of, str | bytes | int):
            given = tuple(map(_listed, args))
            if isinstance(of, str | bytes) and method.__name__ not in ("startswith", "endswith"):
                sought = [len(each) for each in args if isinstance(each, str | bytes)]
                _spend(len(of) * max([1, *sought] if method.__name__ in _QUADRATIC else [1]) // STEP)
            if isinstance(of, str) and method.__name__ in ("format", "format_map"):
                fields = _EscapedFields(__self, escape=of.escape) if isinstance(of, Markup) else _Fields(__self)
                values = (given, kwargs) if method.__name__ == "format" else ((), *given)
                return _charged(type(of)(fields.vformat(of, *values)))
            _spend(_grows(method.__name__, of, (*given, *kwargs.values())))
            return _charged(super().call(__context, __obj, *given, **kwargs))
        if isinstance(of, BoundedEnvironment):
            return super().call(__context, __obj, *args, **kwargs)
        return _charged(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            if bits > _LARGEST_BITS:
                raise RunawayTemplateError
        elif operator == "*":
            value, times = (right, left) if isinstance(left, int) else (left, right)
            _spend(size_of(value, BASE) * max(0, times if isinstance(times, int) else 1))
        elif operator == "%":
            _spend(_grows("%", left, right if isinstance(right, tuple) else (right,)))
        return _charged(super().call_binop(context, operator, left, right))


@pass_context
def _output(_context: Context, value: Any) -> Any:
    """What is written out, also into a variable; with the context, so that Jinja writes nothing out in advance."""
    return _charged(value)


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    if hasattr(function, "charged_"):
        return function
    num_own = 1 if getattr(function, "jinja_pass_arg", None) is not None else 0

    @wraps(function)
    def bounded(*arguments: Any, **named: Any) -> Any:
        own, (value, *rest) = arguments[:num_own], arguments[num_own:]
        if name not in ("map", "select", "reject", "selectattr", "rejectattr"):
            value, rest = _listed(value), list(map(_listed, rest))
            named = {key: _listed(each) for key, each in named.items()}
        in_order = sorted(named, key=lambda key: {"old": 0, "new": 1}.get(key, 2))  # as `replace` has them
        given = (*rest, *(named[key] for key in in_order))
        if any(isinstance(each, int) and abs(each) > LARGEST_NUMBER for each in given):
            raise RunawayTemplateError
        _charged(value)
        if isinstance(value, range):
            _spend(STEP * len(value))
        _spend(_grows(name, value, given))
        return _charged(function(*own, value, *rest, **named))

    bounded.charged_ = True  # type: ignore[attr-defined]
    return bounded


def _bounded_test(function: Any) -> Any:
    if hasattr(function, "charged_"):
        return function

    def bounded(*values: Any) -> Any:
        values = tuple(map(_listed, values))
        for value in values:
            _spend(_looked_through(value))
        return function(*values)

    bounded.charged_ = True  # type: ignore[attr-defined]
    return bounded
