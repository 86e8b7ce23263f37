"""Overrides on the command line, in Hydra's grammar: read, applied, and what to write instead of one that is none."""

import re
import shlex
from collections.abc import Collection, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from nemo_rl_offload.config.full_schema import may_be_added, right_place, section_at
from nemo_rl_offload.config.sources import OVERRIDE, merged, nodes
from nemo_rl_offload.errors import ConfigError, first_line, nearest, shortened
from nemo_rl_offload.specs.documents import MAX_DIGITS, TOO_DEEP, TOO_MANY_DIGITS, is_too_deep

_MAX_OVERRIDE, _MAX_OVERRIDE_VALUES = 1 << 17, 1_000
"""Characters; and brackets and commas outside of quotes."""
_MAX_CUTS = 100
_QUOTED = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""")
_NO_ITEM = re.compile(r",\s*(?=[]}]$)")
_NUMBER = re.compile(r"[-+]?\.?\d[\d_.]*([eE][-+]?\d+)?")


def overridden(config: dict[str, Any], overrides: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Change ``config`` in place; returns the origins of what was given, by path, and what is wrong, a line each."""
    origins, problems = dict[str, str](), list[str]()
    rest = list(overrides)
    while rest:
        text = rest.pop(0)
        if whole := _whole_of_cuts(text, rest):
            rest = rest[whole.num_words - 1 :]
            written = shlex.quote(whole.text) if whole.text == shortened(whole.text) else "all of it in quotes."
            problems.append(f"override '{shortened(text)}': it is cut at a blank. Write {written}")
            continue
        try:
            override = _parsed(text)
            before = {path for path, _ in nodes(config)}
            _apply(config, override)
            origins |= _origins(override, before)
        except ConfigError as error:
            problems.append(f"override '{shortened(text)}': {error}")
        except HydraException as error:
            problems.append(_how_to_write(text, error, config))
    return origins, problems


class _Whole(NamedTuple):
    """What a shell has cut at blanks, joined again."""

    text: str
    num_words: int


def _whole_of_cuts(text: str, rest: Sequence[str]) -> _Whole | None:
    """A word with those behind it that belong to it; None where it is whole by itself."""
    _, equals, value = text.partition("=")
    following, num, blank = rest[0] if rest else "", 0, ""
    if equals and _unclosed(value):
        ends, blank = range(1, min(len(rest), _MAX_CUTS) + 1), " "
        num = next((end for end in ends if not _unclosed(" ".join([value, *rest[:end]]))), 0)
    elif not equals and following[:1] == "=" != following[1:2]:
        num = 2 if following == "=" else 1
    elif equals and not value and following and "=" not in following:
        num = 1
    whole = blank.join([text, *rest[:num]])
    return _Whole(whole, 1 + num) if num and _parses(whole) else None


def _parses(text: str) -> bool:
    try:
        _parsed(text)
    except (HydraException, ConfigError):
        return False
    return True


def _parsed(text: str) -> Override:
    """Raises HydraException for what is no override, ConfigError for one that is out of all bounds."""
    outside_quotes = _QUOTED.sub("", text)
    if len(text) > _MAX_OVERRIDE or sum(map(outside_quotes.count, "[{(,")) > _MAX_OVERRIDE_VALUES:
        raise ConfigError("is too long. Write such a value into a file")
    try:
        override = OverridesParser.create().parse_override(text)
        value = override.value()
    except RecursionError as error:
        raise ConfigError(TOO_DEEP) from error
    except ValueError as error:  # of int()
        raise ConfigError(TOO_MANY_DIGITS if "digits" in str(error) else first_line(error)) from error
    if is_too_deep(value):
        raise ConfigError(TOO_DEEP)
    numbers = [value, *(each for _, each in nodes(value))]
    if any(isinstance(each, int) and each.bit_length() > 4 * MAX_DIGITS for each in numbers):
        raise ConfigError(TOO_MANY_DIGITS)
    return override


def _unclosed(value: str) -> str:
    """The brackets that close what a value has opened; nothing where they match, or cannot be made to, or in quotes."""
    if '"' in value or "'" in value:
        return ""
    pairs, open_ones = {"[": "]", "{": "}"}, list[str]()
    for letter in value:
        if letter in pairs:
            open_ones.append(pairs[letter])
        elif letter in pairs.values() and (not open_ones or open_ones.pop() != letter):
            return ""
    return "".join(reversed(open_ones))


def _how_to_write(text: str, error: HydraException, config: dict[str, Any]) -> str:
    """The fix for an override that is none."""
    if len(text) > 1000:
        return f"override '{shortened(text)}' is none: {shortened(first_line(error))}. Write key=value."
    key, equals, value = text.partition("=")
    if not equals:
        how = "Write key=value, or ~key to remove one."
        if text.endswith((".yaml", ".yml")):
            how = "A configuration file is given by --config (run), or as the one FILE (check, plan)."
        elif _is_value(text):
            how = "Write a key and its value as one word: key=value."
        elif path := _nearest_path(text, config):
            how = f"Write {path}=value, or ~{path} to remove it."
        return f"'{text}' is no override. {how}"
    if value.startswith("="):
        return f"override '{text}': one = is meant. Write {key}={value.lstrip('=')}"
    if (closing := _unclosed(value)) and _parses(closed := f"{key}={value.rstrip(', ')}{closing}"):
        return f"override '{text}': a bracket is not closed. Write {closed}"
    if _parses(bare := f"{key.strip()}={_NO_ITEM.sub('', value.strip())}"):
        what = "a comma stands behind the last item" if _NO_ITEM.search(value) else "blanks stand beside the ="
        return f"override '{text}': {what}. Write {shlex.quote(bare)}"
    wrong = f"override '{text}': {first_line(error)}. Write key=value, +key=value or ~key"
    quoted = f'"{value}"'
    if value.startswith("[") or not _parses(f"{key}={quoted}"):
        return f"{wrong}."
    return f"{wrong}; text with such characters in quotes: {key}={shlex.quote(quoted)}"


def _is_value(text: str) -> bool:
    """A number, a truth value or a list, which no key is called."""
    return text.lower() in ("true", "false", "null", "none") or text[:1] in "[{" or bool(_NUMBER.fullmatch(text))


def _nearest_path(name: str, config: dict[str, Any]) -> str | None:
    """The key that is spelt so or almost so, with its section or without."""
    paths = {path: path for path, _ in nodes(config)}
    if "." not in name:
        paths = {path.rpartition(".")[2]: path for path in reversed(paths)}
    return next((paths[found] for found in get_close_matches(name, paths, n=1)), None)


def _origins(override: Override, before: Collection[str]) -> dict[str, str]:
    """Of the key, of what it holds, and of the sections around it that were not there ``before``."""
    path = override.key_or_group
    parts = path.split(".")
    around = [section for depth in range(1, len(parts)) if (section := ".".join(parts[:depth])) not in before]
    given = [f"{path}.{inner}" for inner, _ in nodes(override.value())]
    return dict.fromkeys([*around, path, *given], OVERRIDE)


def _apply(config: dict[str, Any], override: Override) -> None:
    """Change `config` in place: `a=1` changes a key, `+a=1` adds one, `++a=1` does either, `~a` removes."""
    if override.is_sweep_override():
        raise ConfigError("sweeps are not supported. For a list, write key=[a,b]")
    if override.package is not None:
        raise ConfigError("'@' has no meaning here. Write a.b.c=value")
    if not override.key_or_group:
        raise ConfigError("no key before the '='. Write key=value")
    *parents, key = override.key_or_group.split(".")
    must_exist = not (override.is_add() or override.is_force_add())
    section = config
    for depth, part in enumerate(parents):
        if part not in section:
            if must_exist:
                raise _no_such_key(override, section, parents[:depth], part)
            section[part] = {}
        section = section[part]
        if not isinstance(section, dict):
            raise ConfigError(f"{'.'.join(parents[: depth + 1])} is not a section. Replace it as a whole")
    value = override.value()
    if must_exist and key not in section:
        raise _no_such_key(override, section, parents, key)
    if override.is_delete():
        if value is not None and value != section[key]:
            raise ConfigError(f"{override.key_or_group} is {section[key]!r}, not {value!r}")
        del section[key]
        return
    if override.is_add() and key in section:
        raise ConfigError(f"{override.key_or_group} exists already. Leave the '+' out")
    section[key] = merged(section.get(key), value)


def _no_such_key(override: Override, section: dict[str, Any], parents: Sequence[str], key: str) -> ConfigError:
    known = section_at(parents)
    hint = nearest(key, section)
    if not may_be_added(key, known):
        hint = hint or right_place(key, known)
    elif not override.is_delete():
        hint += " To add a key, write +key=value"
    return ConfigError(f"no key {'.'.join([*parents, key])} to {'remove' if override.is_delete() else 'change'}.{hint}")
