"""Reads a configuration: YAML files that inherit from others, overrides in Hydra's grammar, interpolations.

A file may name others under `defaults:` (one file, or a list; relative to the file itself, else shipped ones like
examples/configs/base.yaml). They are merged in order, the later one wins, and the file's own keys come last. Mappings
merge; lists and scalars replace. A section with `_override_: true` replaces the inherited one as a whole, as in
NeMo-RL. `${other.key}` is resolved at the very end, so it sees overrides. Which keys exist is left to `validation.py`,
but for advice on an override that names none. Neither torch nor Ray is imported.
"""

import json
import operator
import re
import shlex
from collections.abc import Callable, Collection, Sequence
from copy import deepcopy
from difflib import get_close_matches
from functools import lru_cache, partial, reduce
from io import StringIO
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import InterpolationResolutionError, InterpolationToMissingValueError, OmegaConfBaseException

from nemo_rl_offload.config.full_schema import may_be_added, plugin_defaults, right_place, section_at
from nemo_rl_offload.config.sources import (
    OVERRIDE,
    UNGIVEN,
    LoadedConfig,
    final_origins,
    nodes,
    places_of,
    references,
)
from nemo_rl_offload.errors import ConfigError, nearest

_PACKAGE = Path(__file__).resolve().parents[1]
PROJECT_ROOT = _PACKAGE if (_PACKAGE / "examples").is_dir() else _PACKAGE.parent
"""The folder with `examples`: the checkout, or the installed package, which holds a copy."""
BASE = PROJECT_ROOT / "examples" / "configs" / "base.yaml"
"""The file of defaults."""
EMPTY_PATH = "is empty. Give a local path."
"""What is wrong with a name without a letter, which would be the current directory's."""
_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "max": max,
}
"""NeMo-RL's functions in interpolations, like `${mul:${a},${b}}`."""


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Return the merged, overridden and resolved configuration as plain dicts and lists.

    Missing values (`???`) stay in the result for `check_config` to report.
    Raises ConfigError for a file that cannot be read, a cycle, overrides that do not apply, or interpolations that
    cannot be resolved.
    """
    loaded = read_config(path, overrides)
    unresolved = [f"{path}: {key}: {text} ({loaded.origin(key)})" for key, text in loaded.unresolved.items()]
    if problems := loaded.problems + unresolved:
        raise ConfigError("\n".join(problems))
    return loaded.values


def read_config(
    path: str | Path, overrides: Sequence[str] = (), *, below: Sequence[str | Path] = (), resolve: bool = True
) -> LoadedConfig:
    """Return what `load_config` does, with the origin of each value, and what that raises an error for.

    The files of ``below`` are inherited as if the file had named them first; plugins' defaults stand below them all.
    Without ``resolve``, interpolations stay.
    Raises ConfigError for a file that cannot be read, or a cycle.
    """
    parts = [_load_file(Path(file), ()) for file in (*below, path)]
    config = reduce(_merge, [plugin_defaults(), *(part.values for part in parts)])
    origins = {key: origin for part in parts for key, origin in part.origins.items()}
    problems = []
    for text in overrides:
        try:
            override = OverridesParser.create().parse_override(text)
            before = {path for path, _ in nodes(config)}
            _apply_override(config, override)
            origins |= _override_origins(override, before)
        except ConfigError as error:
            problems.append(f"override '{text}': {error}")
        except HydraException as error:
            problems.append(_how_to_write(text, error, config))
    values, unresolved = _resolve(config, path) if resolve else (config, {})
    is_alone = not below and len(files_of(Path(path))) == 1
    return LoadedConfig(
        values,
        final_origins(config, origins, unresolved),
        problems,
        unresolved,
        references(config),
        str(BASE.relative_to(PROJECT_ROOT)) if is_alone else "",
    )


def _how_to_write(text: str, error: HydraException, config: dict[str, Any]) -> str:
    """The fix for an override that is none."""
    key, equals, value = text.partition("=")
    if not equals:
        how = "Write key=value, or ~key to remove one."
        if text.endswith((".yaml", ".yml")):
            how = "A configuration file is given by --config (run), or as the one FILE (check, plan)."
        elif path := _nearest_path(text, config):
            how = f"Write {path}=value, or ~{path} to remove it."
        return f"'{text}' is no override. {how}"
    wrong = f"override '{text}': {_first_line(error)}. Write key=value, +key=value or ~key"
    quoted = f'"{value}"'
    try:
        OverridesParser.create().parse_override(f"{key}={quoted}")
    except HydraException:
        return f"{wrong}."
    return f"{wrong}; text with such characters in quotes: {key}={shlex.quote(quoted)}"


def _nearest_path(name: str, config: dict[str, Any]) -> str | None:
    """The key that is spelt so or almost so, with its section or without."""
    paths = {path: path for path, _ in nodes(config)}
    if "." not in name:
        paths = {path.rpartition(".")[2]: path for path in reversed(paths)}
    return next((paths[found] for found in get_close_matches(name, paths, n=1)), None)


def _override_origins(override: Override, before: Collection[str]) -> dict[str, str]:
    """Of the key, of what it holds, and of the sections around it that were not there ``before``."""
    path = override.key_or_group
    parts = path.split(".")
    around = [section for depth in range(1, len(parts)) if (section := ".".join(parts[:depth])) not in before]
    given = [f"{path}.{inner}" for inner, _ in nodes(override.value())]
    return dict.fromkeys([*around, path, *given], OVERRIDE)


def _resolve(config: dict[str, Any], path: str | Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values, and why some of them cannot be resolved, by their paths; those are `UNGIVEN`."""
    for name, function in _ARITHMETIC.items():
        OmegaConf.register_new_resolver(name, partial(_of_numbers, name, function), replace=True)
    tree = OmegaConf.create(config)
    unresolved: dict[str, str] = {}
    while True:
        try:
            resolved: Any = OmegaConf.to_container(tree, resolve=True)
            return {str(key): value for key, value in resolved.items()}, unresolved
        except OmegaConfBaseException as error:
            place = error.full_key or ""
            key = re.sub(r"\[(\w+)\]", r".\1", place)
            if not isinstance(error, InterpolationResolutionError) or not key or key in unresolved:
                raise ConfigError(f"{path}: {key or 'interpolation'}: {_first_line(error)}") from error
            unresolved[key] = _circle(key, config) or _why(error)
            OmegaConf.update(tree, place, UNGIVEN)


def _of_numbers(name: str, function: Callable[..., Any], *given: Any) -> Any:
    for value in given:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"{name} takes numbers, not {json.dumps(value, default=str)}")
    return function(*given)


def _circle(key: str, config: dict[str, Any]) -> str | None:
    """What is wrong with a value that is made of itself, by way of others; None where it is not."""
    made_of = references(config)
    ways = [[key]]
    seen: set[str] = set()
    for way in ways:
        for source in made_of.get(way[-1], ()):
            if source == key or key.startswith(f"{source}."):
                return f"is made of itself: {' -> '.join([*way, source])}. Give one of them a value."
            if source not in seen:
                seen.add(source)
                ways.append([*way, source])
    return None


def _why(error: InterpolationResolutionError) -> str:
    text = _first_line(error).rpartition(" raised while resolving interpolation: ")[-1]
    if isinstance(error, InterpolationToMissingValueError):
        missing = text.rpartition(": ")[-1]
        return f"is made of {missing}, a missing value. Give one: {missing}=..."
    return text


def resolve_model_path(name: str) -> Path:
    """Return the local folder of a model in Hugging Face format.

    A relative name is looked up in the current directory, then in the project's root.
    Raises ConfigError when no such folder with a `config.json` exists; model hubs are never asked.
    """
    return _resolve_folder(name, "config.json")


def resolve_tokenizer_path(name: str) -> Path:
    """Return the local folder of a Hugging Face tokenizer, by the rules of `resolve_model_path`."""
    return _resolve_folder(name, "tokenizer_config.json")


def resolve_data_path(name: str) -> Path:
    """Return the file or folder with data, looked up in the current directory, then in the project's root.

    Raises ConfigError when there is none.
    """
    candidates = _candidates(name)
    for candidate in candidates:
        if candidate.exists():
            return candidate
    raise ConfigError(f"'{name}' is not there (looked in {', '.join(map(str, candidates))}). Give a local path.")


def _candidates(name: str) -> list[Path]:
    if not name.strip():
        raise ConfigError(EMPTY_PATH)
    path = Path(name).expanduser()
    return list(dict.fromkeys([Path.cwd() / path, PROJECT_ROOT / path]))


def _resolve_folder(name: str, required_file: str) -> Path:
    candidates = _candidates(name)
    for candidate in candidates:
        if (candidate / required_file).is_file():
            return candidate
    looked = ", ".join(str(candidate) for candidate in candidates)
    raise ConfigError(
        f"'{name}' is not a local Hugging Face folder with a {required_file} (looked in {looked}). "
        "Model hubs are not used: give the path of a downloaded folder."
    )


def files_of(path: Path) -> list[Path]:
    """A configuration's file and all that it names under `defaults:`, resolved. They can be loaded."""
    names = _defaults_of(_read_yaml(path, "").values, path)
    return [path.resolve(), *(each for name in names for each in files_of(_inherited(name, path)))]


def _inherited(name: str, heir: Path) -> Path:
    beside, shipped = heir.parent / name, PROJECT_ROOT / name
    return shipped if shipped.is_file() and not beside.exists() else beside


def _load_file(path: Path, including: tuple[Path, ...]) -> LoadedConfig:
    chain = (*including, path)
    if path.resolve() in [ancestor.resolve() for ancestor in including]:
        raise ConfigError(f"defaults form a cycle: {' -> '.join(map(str, chain))}")
    own = _read_yaml(path, f" (included by {including[-1]})" if including else "")
    parts = [*(_load_file(_inherited(name, path), chain) for name in _defaults_of(own.values, path)), own]
    merged: dict[str, Any] = reduce(_merge, [part.values for part in parts], {})
    return LoadedConfig(merged, {key: origin for part in parts for key, origin in part.origins.items()})


def _read_yaml(path: Path, origin: str) -> LoadedConfig:
    try:
        text = path.read_text(encoding="utf-8")
        places = places_of(text, str(path))
        content = deepcopy(_parse(text))
    except OSError as error:
        raise ConfigError(f"{path}{origin}: cannot read the file: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}{origin}: the file is not UTF-8 text") from error
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{path}{line}: {error.problem or error.context}") from error
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path}: {_first_line(error)}") from error
    except RecursionError as error:
        raise ConfigError(f"{path}: a value contains itself by an alias (*name)") from error
    if not isinstance(content, dict) or (content and not places):  # OmegaConf takes text for a key
        what = "a list" if isinstance(content, list) else "a single value"
        raise ConfigError(f"{path}{origin}: the file must hold 'key: value' lines, not {what}")
    return LoadedConfig({str(key): value for key, value in content.items()}, places)


@lru_cache(maxsize=64)
def _parse(text: str) -> Any:
    try:
        return OmegaConf.to_container(OmegaConf.load(StringIO(text)))
    except OSError:  # OmegaConf's word for a number or a truth value alone
        return None


def _defaults_of(content: dict[str, Any], path: Path) -> list[str]:
    """Take `defaults` out of a file's content."""
    defaults = content.pop("defaults", [])
    names = [defaults] if isinstance(defaults, str) else defaults
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{path}: defaults: give a file name or a list of file names, not {defaults!r}")
    return names


def _merge(old: Any, new: Any) -> Any:
    if not isinstance(new, dict):
        return new
    kept = old if isinstance(old, dict) and not new.get("_override_") else {}
    return kept | {key: _merge(kept.get(key), value) for key, value in new.items() if key != "_override_"}


def _apply_override(config: dict[str, Any], override: Override) -> None:
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
    section[key] = _merge(section.get(key), value)


def _no_such_key(override: Override, section: dict[str, Any], parents: Sequence[str], key: str) -> ConfigError:
    known = section_at(parents)
    hint = nearest(key, section)
    if not may_be_added(key, known):
        hint = hint or right_place(key, known)
    elif not override.is_delete():
        hint += " To add a key, write +key=value"
    return ConfigError(f"no key {'.'.join([*parents, key])} to {'remove' if override.is_delete() else 'change'}.{hint}")


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
