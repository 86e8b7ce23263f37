"""What the schema's sections are made of: ranges of numbers, defaults, and the words that describe a type to a user."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, reduce
from operator import getitem
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

from annotated_types import Ge, Gt, Le, Lt
from pydantic import ConfigDict, with_config

closed = with_config(ConfigDict(extra="forbid", strict=True, allow_inf_nan=False))


@dataclass(frozen=True)
class Default:
    """The value of a key that is not given; an interpolation, such as ``"${policy.precision}"``, is text."""

    value: Any


@dataclass(frozen=True)
class Forwarded:
    """The value is handed to Megatron-Core's field of the same name; ``unless_null``, where null keeps the model's."""

    unless_null: bool = False


Positive = Annotated[int, Gt(0)]
Count = Annotated[int, Ge(0)]
Seed = Annotated[int, Ge(0), Lt(1 << 32)]
NonNegative = Annotated[float, Ge(0)]
Share = Annotated[float, Gt(0), Le(1)]
Fraction = Annotated[float, Ge(0), Le(1)]
Beta = Annotated[float, Ge(0), Lt(1)]
Seconds = Annotated[float, Gt(0)]
Size = Annotated[str, 'like "72GiB"']

_NAMES = {int: "a whole number", float: "a number", str: "text", bool: "true or false", NoneType: "null", Any: "any"}
_PLURALS = {int: "whole numbers", float: "numbers", str: "text", Any: "values"}
_BOUNDS = ((Gt, "gt", "above"), (Ge, "ge", "from"), (Lt, "lt", "below"), (Le, "le", "up to"))


def keys_of(annotation: Any) -> dict[str, Any]:
    """Return key -> what it allows of a section, or ``{}`` for anything else."""
    return {key: _without_markers(declared) for key, declared in _declared(annotation).items()}


def defaults_of(section: Any) -> dict[str, Any]:
    """Return the defaults of a section and of the sections in it; of keys that have one."""
    found: dict[str, Any] = {}
    for key, declared in _declared(section).items():
        if is_typeddict(declared):
            found[key] = defaults_of(declared)
        for marker in _markers(declared):
            if isinstance(marker, Default):
                found[key] = marker.value
    return found


def forwarded(section: Any, *, unless_null: bool) -> tuple[str, ...]:
    """Return the keys of a section that are marked so."""
    return tuple(key for key, declared in _declared(section).items() if Forwarded(unless_null) in _markers(declared))


def _declared(annotation: Any) -> Mapping[str, Any]:
    return _hints(annotation) if is_typeddict(annotation) else {}


@cache
def _hints(section: type) -> Mapping[str, Any]:
    return get_type_hints(section, include_extras=True)


def _markers(declared: Any) -> tuple[Any, ...]:
    return declared.__metadata__ if get_origin(declared) is Annotated else ()


def _without_markers(declared: Any) -> Any:
    if get_origin(declared) is not Annotated:
        return declared
    kept = [marker for marker in _markers(declared) if not isinstance(marker, Default | Forwarded)]
    return reduce(lambda allowed, marker: getitem(Annotated, (allowed, marker)), kept, declared.__origin__)


def describe(annotation: Any) -> str:
    """Say in words what ``annotation`` allows, such as ``"a number above 0 up to 1, or text"``."""
    arguments = get_args(annotation)
    origin = get_origin(annotation)
    if origin is Annotated:
        return " ".join([describe(arguments[0]), *_limits(arguments[1:])])
    if origin in (Union, UnionType):
        return ", or ".join(describe(a) for a in arguments)
    if origin is Literal:
        return " or ".join("null" if a is None else f"'{a}'" for a in arguments)
    if origin is list:
        return f"a list of {'sections' if is_typeddict(arguments[0]) else _plural(arguments[0])}"
    if origin is dict:
        return f"a mapping of {_plural(arguments[0])} to {_plural(arguments[1])}"
    return _NAMES.get(annotation, "a section of keys")


def item_type(annotation: Any, container: type) -> Any:
    """Return the type of the items of the list, or of the values of the dict, that ``annotation`` allows."""
    found = [a for a in (annotation, *get_args(annotation)) if get_origin(a) is container]
    return get_args(found[0])[-1] if found else None


def _plural(annotation: Any) -> str:
    plain, *markers = get_args(annotation) if get_origin(annotation) is Annotated else (annotation,)
    return " ".join([_PLURALS[plain], *_limits(markers)])


def _limits(markers: Iterable[Any]) -> Iterator[str]:
    """Bounds, and then examples."""
    found = [*markers]
    for bound in found:
        yield from (f"{word} {getattr(bound, name)}" for kind, name, word in _BOUNDS if isinstance(bound, kind))
    yield from (each for each in found if isinstance(each, str))
