"""How tests in one process use what a program defines in another, without trusting it.

A test is written as if the program stood above it: `assert f(1) == [2]`. In the program's own process any test can be
made to pass: by objects that equal everything, by other builtins, by a changed `AssertionError`. So the test runs
elsewhere, and `f` is a `Remote` there. A call's arguments go over as plain data, and plain data come back; comparing is
the test's own affair. What is no plain data stays where it is and is known by a number.

What that gives up: a program's objects equal only themselves, whatever their class says; arguments are copies, which
the program changes for itself; functions of the test cannot be handed over.

One side asks, a line of JSON each, and the other answers. JSON, since unpickling or unmarshalling what a program wrote
would be trusting it.
"""

import builtins
import json
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO, Protocol, TypeGuard

type Refer = Callable[[object], int]
"""The number of what is no plain data. Raises TypeError where it has none."""
type Resolve = Callable[[int], object]

_OPERATIONS: Mapping[str, Callable[..., object]] = {
    "getattr": getattr,
    "setattr": setattr,
    "call": lambda function, args, kwargs: function(*args, **kwargs),
    "iter": iter,
    "next": next,
    "len": len,
    "getitem": operator.getitem,
    "bool": bool,
    "str": str,
}


class Remote:
    """What stands in the program's process, by its number."""

    __slots__ = ("_ask", "_number")
    _ask: "Ask"
    _number: int

    def __init__(self, ask: "Ask", number: int) -> None:
        object.__setattr__(self, "_ask", ask)
        object.__setattr__(self, "_number", number)

    def __getattr__(self, name: str) -> Any:
        return self._ask("getattr", self, name)

    def __setattr__(self, name: str, value: object) -> None:
        self._ask("setattr", self, name, value)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        return self._ask("call", self, args, kwargs)

    def __iter__(self) -> Iterator[Any]:
        iterator: Iterator[Any] = self._ask("iter", self)
        return iterator

    def __next__(self) -> Any:
        return self._ask("next", self)

    def __len__(self) -> int:
        return int(self._ask("len", self))

    def __getitem__(self, key: object) -> Any:
        return self._ask("getitem", self, key)

    def __bool__(self) -> bool:
        return bool(self._ask("bool", self))

    def __str__(self) -> str:
        return str(self._ask("str", self))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Remote) and self._number == other._number

    def __hash__(self) -> int:
        return hash(self._number)


class Ask(Protocol):
    """Has the program's process do something."""

    def __call__(self, operation: str, *args: object) -> Any:
        """Return what came of it; raises what it raised, as the nearest of Python's own exceptions, or EOFError."""


def asking(requests: BinaryIO, answers: BinaryIO, when_gone: Callable[[], object]) -> Ask:
    """The asking side; `when_gone` is called where no answer comes any more."""

    def refer(value: object) -> int:
        if not isinstance(value, Remote):
            raise TypeError(f"{type(value).__name__} cannot be handed to the program: it takes plain data")
        return value._number

    def ask(operation: str, *args: object) -> Any:
        try:
            _send(requests, [operation, [encoded(arg, refer) for arg in args]])
            line = answers.readline()
        except BrokenPipeError:
            line = b""
        if not line:
            when_gone()
            raise EOFError
        kind, content = json.loads(line)
        if kind == "value":
            return decoded(content, lambda number: Remote(ask, number))
        names, message = content
        known = filter(_is_error, (getattr(builtins, str(name), None) for name in names))
        raise next(known, RuntimeError)(str(message))

    return ask


def serve(requests: BinaryIO, answers: BinaryIO, names: Mapping[str, object]) -> None:
    """The program's side: answer until nothing is asked any more. `name` gives what the program calls so."""
    held: list[object] = []
    numbers: dict[int, int] = {}

    def refer(value: object) -> int:
        number = numbers.setdefault(id(value), len(held))  # no other object has its id, since it is held
        if number == len(held):
            held.append(value)
        return number

    for line in requests:
        operation, encoded_args = json.loads(line)
        try:
            args = [decoded(arg, held.__getitem__) for arg in encoded_args]
            value = names[args[0]] if operation == "name" else _OPERATIONS[operation](*args)
            answer = ["value", encoded(value, refer)]
        except BaseException as error:  # noqa: BLE001 - whatever it is, the test is told
            answer = ["error", [[each.__name__ for each in type(error).__mro__], str(error)]]
        _send(answers, answer)


def encoded(value: object, refer: Refer) -> object:
    """A value as JSON's values. Subclasses of plain types go as these."""

    def each(values: Any) -> list[object]:
        return [encoded(item, refer) for item in values]

    match value:
        case None | True | False:
            return value
        case str():
            return str.__str__(value)
        case int():
            return {"int": hex(value)}
        case float():
            return {"float": float.hex(value)}
        case complex():
            return {"complex": [float.hex(value.real), float.hex(value.imag)]}
        case bytes() | bytearray():
            return {"bytes" if isinstance(value, bytes) else "bytearray": value.hex()}
        case range():
            return {"range": [hex(each) for each in (value.start, value.stop, value.step)]}
        case list() | tuple() | set() | frozenset():
            kind = next(kind for kind in (list, tuple, set, frozenset) if isinstance(value, kind))
            return {kind.__name__: each(value)}
        case dict():
            return {"dict": [each(pair) for pair in value.items()]}
    if all(hasattr(type(value), name) for name in ("ndim", "item")) and value.ndim == 0:  # type: ignore[attr-defined]
        return encoded(value.item(), refer)  # type: ignore[attr-defined]  # numpy's numbers
    return {"object": refer(value)}


def decoded(content: Any, resolve: Resolve) -> Any:
    """The value of `encoded`. Raises for anything else."""
    if not isinstance(content, dict):
        return content
    ((kind, inner),) = content.items()
    match kind:
        case "int":
            return int(inner, 16)
        case "float":
            return float.fromhex(inner)
        case "complex":
            return complex(*map(float.fromhex, inner))
        case "bytes":
            return bytes.fromhex(inner)
        case "bytearray":
            return bytearray.fromhex(inner)
        case "range":
            return range(*(int(each, 16) for each in inner))
        case "dict":
            return {decoded(key, resolve): decoded(value, resolve) for key, value in inner}
        case "object":
            return resolve(inner)
    return _SEQUENCES[kind](decoded(item, resolve) for item in inner)


_SEQUENCES: Mapping[str, Callable[[Iterator[object]], object]] = {
    kind.__name__: kind for kind in (list, tuple, set, frozenset)
}


def _send(file: BinaryIO, content: object) -> None:
    file.write(json.dumps(content).encode() + b"\n")
    file.flush()


def _is_error(error: object) -> TypeGuard[type[Exception]]:
    return isinstance(error, type) and issubclass(error, Exception)
