"""Everything that is wrong with a configuration, said at once and before anything starts.

First the schema is checked by pydantic, whose errors are worded anew: path, what was given, what is allowed,
the nearest name. Then come the rules of `rules.py` that join several keys. A rule reads values by their path;
where a value is missing or of the wrong type, and so reported already, the rule ends and the others go on.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

from nemo_rl_offload.config.rule import Get, ReportedError, Rule
from nemo_rl_offload.config.rules import RULES, RULES_OF_THIS_MACHINE, WARNINGS
from nemo_rl_offload.config.schema import MasterConfig
from nemo_rl_offload.config.types import describe, item_type, keys_of
from nemo_rl_offload.errors import ConfigError, nearest


@dataclass(frozen=True)
class CheckedConfig:
    """A configuration that can be run, and what its author should know about it."""

    config: MasterConfig
    warnings: list[str]


def check_config(raw: Mapping[str, Any], source: str = "configuration", *, run_here: bool = True) -> CheckedConfig:
    """Check a loaded configuration; ``source`` is the file name that errors begin with.

    What a run needs on this machine, such as the model's folder, is an error with ``run_here`` and else a warning.

    Raises one ConfigError with all problems, one per line, each beginning with the key's path.
    """
    problems = _missing_values(raw)
    try:
        config = _adapter().validate_python(raw)
    except ValidationError as error:
        for path, text in _schema_problems(raw, error).items():
            problems.setdefault(path, text)
    get = _reader(raw, problems)
    lines = [f"{path}: {text}" for path, text in problems.items()]
    here = [line for rule in RULES_OF_THIS_MACHINE for line in _run(rule, get)]
    lines += [line for rule in RULES for line in _run(rule, get)] + (here if run_here else [])
    if lines:
        count = "1 problem" if len(lines) == 1 else f"{len(lines)} problems"
        raise ConfigError(f"{source}: {count}\n" + "\n".join(lines))
    warnings = [f"{line} Only a run needs it." for line in here if not run_here]
    return CheckedConfig(config, warnings + [line for rule in WARNINGS for line in _run(rule, get)])


@cache
def _adapter() -> TypeAdapter[MasterConfig]:
    return TypeAdapter(MasterConfig)


def _missing_values(node: Any, path: str = "") -> dict[str, str]:
    """Return the paths that hold OmegaConf's mark for a value that must be given."""
    if node == "???":
        return {path: f"missing value. Give one: {path}=..."}
    children = node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list) else ()
    found = [_missing_values(child, f"{path}.{key}" if path else str(key)) for key, child in children]
    return {path: text for part in found for path, text in part.items()}


def _schema_problems(raw: Mapping[str, Any], error: ValidationError) -> dict[str, str]:
    problems = {}
    for details in error.errors(include_url=False, include_context=False):
        location = details["loc"]
        if details["type"] in ("extra_forbidden", "invalid_key") or location[-1] == "[key]":
            location = tuple(part for part in location if part != "[key]")
            section = _locate(raw, location[:-1])[1]
            problems[_dotted(location)] = f"unknown key.{_right_place(str(location[-1]), section)}"
            continue
        keys, annotation, value = _locate(raw, location)
        given = "missing" if details["type"] == "missing" else f"{_shown(value)} is not allowed"
        problems[_dotted(keys)] = f"{given}. Allowed: {describe(annotation)}.{_hint(annotation, value)}"
    inner = [path for path in problems if any(other.startswith(f"{path}.") for other in problems)]
    return {path: text for path, text in problems.items() if path not in inner}


def _dotted(location: Iterable[int | str]) -> str:
    return ".".join(map(str, location))


def _locate(raw: Any, location: Iterable[int | str]) -> tuple[list[int | str], Any, Any]:
    """Follow a location in the data and in the schema; return path, annotation and value.

    Pydantic puts a tag for the member of a union into the location: one for a list stands before the item's number,
    others end the walk.
    """
    path: list[int | str] = []
    annotation: Any = MasterConfig
    for part in location:
        is_key = isinstance(raw, Mapping) and (part in raw or part in keys_of(annotation))
        is_item = isinstance(raw, list) and isinstance(part, int)
        if str(part).startswith("list["):
            continue
        if not (is_key or is_item):
            break
        path.append(part)
        inner = item_type(annotation, dict if is_key else list)
        annotation = keys_of(annotation).get(str(part), inner) if is_key else inner
        raw = raw.get(part) if is_key else raw[part]
    return path, annotation, raw


def _right_place(key: str, section: Any) -> str:
    """Return the nearest key of the section, else the section of another place that has this very key."""
    return nearest(key, keys_of(section)) or next(
        (f" It belongs to {path}." for path, keys in _sections(MasterConfig, "") if path and key in keys), ""
    )


def _sections(annotation: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    keys = keys_of(annotation)
    yield path, keys
    for key, child in keys.items():
        yield from _sections(child, f"{path}.{key}".lstrip("."))


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _hint(annotation: Any, value: Any) -> str:
    """Return the list form for text where a list is needed, or the nearest of the allowed names."""
    if not isinstance(value, str):
        return ""
    allowed = describe(annotation)
    if hint := nearest(value, re.findall(r"'([^']+)'", allowed)):
        return hint
    return f" Write it as a list: [{', '.join(re.findall(r'[^\s,]+', value))}]" if "a list of text" in allowed else ""


def _reader(raw: Mapping[str, Any], problems: Iterable[str]) -> Get:
    reported = set(problems)

    def get(path: str) -> Any:
        node: Any = raw
        parts = path.split(".")
        for depth, part in enumerate(parts, start=1):
            if ".".join(parts[:depth]) in reported:
                raise ReportedError
            node = node[part]
        if any(problem.startswith(f"{path}.") for problem in reported):
            raise ReportedError
        return node

    return get


def _run(rule: Rule, get: Get) -> Iterator[str]:
    try:
        yield from rule(get)
    except ReportedError:
        return
