"""Pickles of which nothing is run but what a table allows.

A pickle is a program: it names functions anywhere in Python and calls them. This reader knows the instructions that
Megatron's and torch's checkpoints are made of. A name stands for what the caller's table has for it, which is never
looked up in a module, and an instruction makes plain values, calls a function of the table, or fills a record of it.
Whatever is in no table ends the reading by its name, before anything of it could run.

Rejected: Python's own unpickler with another `find_class`. It sets attributes of whatever was made, so also of the
classes of the table, takes 32 GiB for an instruction of five bytes (a place in its memo), and hashes a tuple of tuples
for ever. Rejected: torch's `weights_only`, which Megatron extends by its own and NumPy's classes for the whole process,
and which checks neither the bounds of a tensor nor what a class is filled with.

It runs in Python: a `.metadata` of 100,000 chunks takes three to four times as long as Python's own,
but is read once, where Megatron has it read three times.
"""

import pickle as op
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from struct import unpack_from
from typing import Any

MAX_DEPTH = 64
MAX_VALUES = 10_000_000
"""Of a result, each counted as often as it can be reached: a few lists of one another are 10^18 values."""
_KEYS = (str, int, float, bool, type(None))


class ForbiddenNameError(Exception):
    """A pickle names what is in no table."""


class UnreadableError(Exception):
    """A pickle, or an archive, is not what a checkpoint has there."""


@dataclass(frozen=True, eq=False)
class Function:
    """What a pickle may call."""

    call: Callable[..., object]


@dataclass(frozen=True, eq=False)
class Record:
    """What a pickle may make an instance of and fill once."""

    kind: type
    fill: Callable[[Any, object], None]
    make: Callable[..., object] | None = None
    """Of the arguments of `__new__`; None where it has none."""
    is_key: bool = False
    """Of a dictionary: its hash is of plain values."""


@dataclass
class _State:
    data: bytes
    names: Mapping[str, object]
    persistent: Callable[[object], object]
    at: int
    records: Mapping[type, Record]
    stack: list[Any] = field(default_factory=list)
    marked: list[list[Any]] = field(default_factory=list)
    memo: dict[int, Any] = field(default_factory=dict)

    def take(self, count: int) -> bytes:
        start, self.at = self.at, self.at + count
        if self.at > len(self.data):
            raise UnreadableError("it ends too early")
        return self.data[start : self.at]

    def byte(self) -> int:
        self.at += 1
        return self.data[self.at - 1]

    def number(self, code: str, count: int) -> Any:
        return unpack_from(code, self.take(count))[0]

    def line(self) -> str:
        end = self.data.index(b"\n", self.at)
        return self.take(end + 1 - self.at)[:-1].decode()

    def name(self, module: str, name: str) -> object:
        full = f"{module}.{name}"
        if full not in self.names:
            raise ForbiddenNameError(full if full.isprintable() and len(full) < 200 else ascii(full)[:200])
        return self.names[full]

    def since_mark(self) -> list[Any]:
        items, self.stack = self.stack, self.marked.pop()
        return items


def unpickle(
    data: bytes,
    names: Mapping[str, object],
    persistent: Callable[[object], object] | None = None,
    *,
    start: int = 0,
) -> tuple[object, int]:
    """What the pickle at `start` holds, and where it ends.

    Args:
        names: what each dotted name stands for: a Function, a Record, or a constant.
        persistent: what stands for a persistent identifier; None: there may be none.

    Raises:
        ForbiddenNameError: it names something else.
        UnreadableError: it is no such pickle.
    """
    records = {entry.kind: entry for entry in names.values() if isinstance(entry, Record)}
    state = _State(data, names, persistent or _no_persistent, start, records)
    try:
        while (code := state.byte()) != op.STOP[0]:
            _INSTRUCTIONS[code](state)
        (result,) = state.stack
        if state.marked:
            raise UnreadableError("it ends inside of a list")
    except (ForbiddenNameError, UnreadableError):
        raise
    except IndexError as error:
        raise UnreadableError("it ends too early") from error
    except KeyError as error:
        raise UnreadableError(f"it has the instruction or place {error}, which is none of a checkpoint's") from error
    except Exception as error:  # whatever a table's function has against its arguments
        raise UnreadableError(f"it makes no sense: {type(error).__name__}: {str(error)[:200]}") from error
    return result, state.at


def check_extent(value: object) -> None:
    """Raises UnreadableError: a value is nested too deeply, contains itself, or is a huge one of few parts."""
    sizes: dict[int, int] = {}

    def size_of(value: object, depth: int) -> int:
        if depth > MAX_DEPTH:
            raise UnreadableError(f"it is nested more than {MAX_DEPTH} levels deep")
        if not isinstance(value, dict | list | tuple):
            return 1
        if id(value) not in sizes:
            parts = value.values() if isinstance(value, dict) else value
            sizes[id(value)] = 1 + sum(size_of(part, depth + 1) for part in parts)
        return sizes[id(value)]

    if size_of(value, 0) > MAX_VALUES:
        raise UnreadableError(f"it is more than {MAX_VALUES} values")


def _no_persistent(_identifier: object) -> object:
    raise UnreadableError("it refers to something outside")


def _push(make: Callable[[_State], object]) -> Callable[[_State], None]:
    return lambda state: state.stack.append(make(state))


def _mark(state: _State) -> None:
    state.marked.append(state.stack)
    state.stack = []


def _push_tuple(state: _State) -> None:
    items = tuple(state.since_mark())
    state.stack.append(items)


def _tuple_of(count: int) -> Callable[[_State], None]:
    def make(state: _State) -> None:
        if len(state.stack) < count:
            raise UnreadableError("it ends too early")
        state.stack[-count:] = [tuple(state.stack[-count:])]

    return make


def _append(state: _State, items: list[Any]) -> None:
    target = state.stack[-1]
    if type(target) is not list:
        raise UnreadableError(f"it appends to {type(target).__name__}")
    target.extend(items)


def _set(state: _State, items: list[Any]) -> None:
    target = state.stack[-1]
    if type(target) not in (dict, OrderedDict) or len(items) % 2:
        raise UnreadableError(f"it sets items of {type(target).__name__}")
    for key in items[::2]:
        if type(key) not in _KEYS and not (type(key) in state.records and state.records[type(key)].is_key):
            raise UnreadableError(f"it has a key of type {type(key).__name__}")
    target.update(zip(items[::2], items[1::2], strict=True))


def _set_item(state: _State) -> None:
    value, key = state.stack.pop(), state.stack.pop()
    _set(state, [key, value])


def _reduce(state: _State) -> None:
    arguments, function = state.stack.pop(), state.stack.pop()
    if not isinstance(function, Function) or type(arguments) is not tuple:
        raise UnreadableError(f"it calls {type(function).__name__}")
    state.stack.append(function.call(*arguments))


def _new(state: _State) -> None:
    arguments, record = state.stack.pop(), state.stack.pop()
    if not isinstance(record, Record) or type(arguments) is not tuple:
        raise UnreadableError(f"it makes an instance of {type(record).__name__}")
    state.stack.append((record.make or (lambda: object.__new__(record.kind)))(*arguments))


def _build(state: _State) -> None:
    content, target = state.stack.pop(), state.stack[-1]
    if type(target) not in state.records:
        raise UnreadableError(f"it sets the state of {type(target).__name__}")
    state.records[type(target)].fill(target, content)


def _put(state: _State, place: int) -> None:
    state.memo[place] = state.stack[-1]


def _stack_global(state: _State) -> None:
    name, module = state.stack.pop(), state.stack.pop()
    if type(name) is not str or type(module) is not str:
        raise UnreadableError("it names something that is no text")
    state.stack.append(state.name(module, name))


_BY_CODE: dict[bytes, Callable[[_State], object]] = {
    op.PROTO: lambda state: state.take(1),
    op.FRAME: lambda state: state.take(8),
    op.MARK: _mark,
    op.NONE: _push(lambda state: None),
    op.NEWTRUE: _push(lambda state: True),
    op.NEWFALSE: _push(lambda state: False),
    op.BININT: _push(lambda state: state.number("<i", 4)),
    op.BININT1: _push(lambda state: state.byte()),
    op.BININT2: _push(lambda state: state.number("<H", 2)),
    op.LONG1: _push(lambda state: int.from_bytes(state.take(state.byte()), "little", signed=True)),
    op.BINFLOAT: _push(lambda state: state.number(">d", 8)),
    op.BINUNICODE: _push(lambda state: state.take(state.number("<I", 4)).decode()),
    op.SHORT_BINUNICODE: _push(lambda state: state.take(state.byte()).decode()),
    op.BINBYTES: _push(lambda state: state.take(state.number("<I", 4))),
    op.SHORT_BINBYTES: _push(lambda state: state.take(state.byte())),
    op.EMPTY_DICT: _push(lambda state: {}),
    op.EMPTY_LIST: _push(lambda state: []),
    op.EMPTY_TUPLE: _push(lambda state: ()),
    op.TUPLE: _push_tuple,
    op.TUPLE1: _tuple_of(1),
    op.TUPLE2: _tuple_of(2),
    op.TUPLE3: _tuple_of(3),
    op.APPEND: lambda state: _append(state, [state.stack.pop()]),
    op.APPENDS: lambda state: _append(state, state.since_mark()),
    op.SETITEM: _set_item,
    op.SETITEMS: lambda state: _set(state, state.since_mark()),
    op.BINPUT: lambda state: _put(state, state.byte()),
    op.LONG_BINPUT: lambda state: _put(state, state.number("<I", 4)),
    op.MEMOIZE: lambda state: _put(state, len(state.memo)),
    op.BINGET: _push(lambda state: state.memo[state.byte()]),
    op.LONG_BINGET: _push(lambda state: state.memo[state.number("<I", 4)]),
    op.GLOBAL: _push(lambda state: state.name(state.line(), state.line())),
    op.STACK_GLOBAL: _stack_global,
    op.REDUCE: _reduce,
    op.NEWOBJ: _new,
    op.BUILD: _build,
    op.BINPERSID: lambda state: state.stack.append(state.persistent(state.stack.pop())),
}
_INSTRUCTIONS = {code[0]: instruction for code, instruction in _BY_CODE.items()}
