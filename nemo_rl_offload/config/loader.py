"""Reads a configuration: YAML files that inherit from others, overrides in Hydra's grammar, interpolations.

A file may name others under `defaults:` (one file, or a list; relative to the file itself, else shipped ones like
examples/configs/base.yaml). They are merged in order, the later one wins, and the file's own keys come last. Mappings
merge; lists and scalars replace. A section with `_override_: true` replaces the inherited one as a whole, as in
NeMo-RL. `${other.key}` is resolved at the very end, so it sees overrides. Which keys exist is left to `validation`, but
for advice on an override that names none. Neither torch nor Ray is imported.

All of it has limits, since what follows takes its time: OmegaConf resolves a value anew wherever it is named, which
doubles with each value that names another one twice, and parsing an override takes the square of its brackets.
"""

import json
import operator
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from difflib import get_close_matches
from functools import lru_cache, partial, reduce
from io import StringIO
from itertools import count
from pathlib import Path
from threading import Lock
from typing import Any

import yaml
from omegaconf import Container, OmegaConf
from omegaconf.errors import (
    InterpolationKeyError,
    InterpolationResolutionError,
    InterpolationToMissingValueError,
    OmegaConfBaseException,
)

from nemo_rl_offload.config.full_schema import full_schema, plugin_defaults
from nemo_rl_offload.config.overrides import overridden
from nemo_rl_offload.config.sources import (
    OVERRIDE,
    UNGIVEN,
    LoadedConfig,
    empty_keys,
    final_origins,
    merged,
    nodes,
    places_of,
    references,
)
from nemo_rl_offload.config.types import keys_of
from nemo_rl_offload.errors import ConfigError, first_line, nearest, nearest_beside, shortened
from nemo_rl_offload.specs.data_sets import HUB, hub_folder
from nemo_rl_offload.specs.documents import (
    CONFIG_BYTES,
    YAML_LOADER,
    DocumentError,
    as_document_error,
    check_yaml,
    read_text,
)
from nemo_rl_offload.specs.hub_cache import cache_folder, downloaded, how_to_download, is_hub_id
from nemo_rl_offload.specs.quantization import NAMED

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
_FUNCTION = re.compile(rf"\$\{{(?:{'|'.join(_ARITHMETIC)}):")
_LONGEST_PATH = 4000
"""Characters of a name that is looked for."""
_MAX_FILES = 100
"""Of a configuration, those that it inherits from included, each as often as it is named."""
_MAX_INTERPOLATED, _MAX_MARKS = 1 << 16, 200
"""Characters, and marks `${`, of a value with interpolations."""
_TOO_LONG = "has too many interpolations (${...}), or too long a text with them"
_MAX_RESOLUTIONS = 2_000
"""Values that are made of others, each as often as it is made. A large recipe has 200."""
_resolving = Lock()


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
    path: str | Path, overrides: Sequence[str] = (), *, whole: bool = False, resolve: bool = True
) -> LoadedConfig:
    """Return what `load_config` does, with the origin of each value, and what that raises an error for.

    With ``whole``, what files and overrides leave out has the default of `base.yaml`. Without ``resolve``,
    interpolations stay.
    Raises ConfigError for a file that cannot be read, or a cycle.
    """
    own = _load_file(_inherited(str(path), Path()), (), count(1))
    defaults = merged(plugin_defaults(), _load_file(BASE, (), count(1)).values if whole else {})
    config = _completed(defaults, own.values) if whole else merged(defaults, own.values)
    given, problems = overridden(config, overrides)
    problems = [*own.problems, *problems]
    origins = {**own.origins, **given}
    if whole:
        config = _completed(defaults, config)
    values, unresolved = _resolve(config, path) if resolve else (config, {})
    return LoadedConfig(
        values,
        final_origins(config, origins, unresolved),
        own.inherited - set(_above([path for path, origin in origins.items() if origin == OVERRIDE])),
        problems,
        unresolved,
        references(config),
    )


def _above(paths: Iterable[str]) -> Iterator[str]:
    """Paths, and the sections that they are in."""
    for path in paths:
        while path:
            yield path
            path = path.rpartition(".")[0]


def _completed(defaults: Any, given: Any) -> Any:
    """What is given, and the defaults of what is not; a section that is null is not given."""
    if not isinstance(defaults, dict) or not defaults:
        return given
    if given is None:
        return deepcopy(defaults)
    if not isinstance(given, dict):
        return given
    kept = {
        key: _completed(default, given[key]) if key in given else deepcopy(default) for key, default in defaults.items()
    }
    return kept | {key: value for key, value in given.items() if key not in defaults}


def _resolve(config: dict[str, Any], path: str | Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values, and why some of them cannot be resolved, by their paths; those are `UNGIVEN`."""
    for name, function in _ARITHMETIC.items():
        OmegaConf.register_new_resolver(name, partial(_of_numbers, name, function), replace=True)
    for key, value in nodes(config):
        if isinstance(value, str) and _is_too_long(value):
            raise ConfigError(f"{path}: {key}: {_TOO_LONG}")
    with _bounded(str(path)):
        values, unresolved = _resolved(OmegaConf.create(_interpolated(config)), config, path)
    return _completed(config, values), unresolved


def _interpolated(config: dict[str, Any]) -> dict[str, Any]:
    """Values with interpolations, and those that they name, in their sections; all where a name is not written out.

    The others are most, and would take OmegaConf as long.
    """
    made_of = references(config)
    texts = [value for _, value in nodes(config) if isinstance(value, str)]
    num_names = sum(text.count("${") - len(_FUNCTION.findall(text)) for text in texts)
    is_written_out = num_names == sum(map(len, made_of.values()))
    if not is_written_out:
        return config
    kept = {*made_of}.union(*made_of.values())
    return _part(config, "", kept, {"", *_above(kept)})


def _part(section: Mapping[str, Any], path: str, kept: Collection[str], above: Collection[str]) -> dict[str, Any]:
    """Of a section what is kept, whole, and the sections above that."""
    found = {}
    for key, value in section.items():
        inner = f"{path}.{key}" if path else str(key)
        if inner in above:
            is_whole = inner in kept or not isinstance(value, Mapping)
            found[key] = value if is_whole else _part(value, inner, kept, above)
    return found


def _is_too_long(value: str) -> bool:
    num_marks = value.count("${")
    return num_marks > _MAX_MARKS or (num_marks > 0 and len(value) > _MAX_INTERPOLATED)


def _resolved(tree: Any, config: dict[str, Any], path: str | Path) -> tuple[dict[str, Any], dict[str, str]]:
    unresolved: dict[str, str] = {}
    while True:
        try:
            resolved: Any = OmegaConf.to_container(tree, resolve=True)
            return {str(key): value for key, value in resolved.items()}, unresolved
        except RecursionError as error:
            raise ConfigError(f"{path}: interpolations (${{...}}) lead one through another too often") from error
        except OmegaConfBaseException as error:
            place = error.full_key or ""
            key = re.sub(r"\[(\w+)\]", r".\1", place)
            if not isinstance(error, InterpolationResolutionError) or not key or key in unresolved:
                raise ConfigError(f"{path}: {key or 'interpolation'}: {first_line(error)}") from error
            unresolved[key] = _circle(key, config) or _why(error, key, config)
            OmegaConf.update(tree, place, UNGIVEN)


class _TooMuchError(BaseException):
    """No Exception, for OmegaConf takes those for an interpolation that cannot be resolved."""


@contextmanager
def _bounded(path: str) -> Iterator[None]:
    """Raise ConfigError where interpolations are resolved more than `_MAX_RESOLUTIONS` times, or make too much text.

    OmegaConf has no hook for it, so its function is replaced meanwhile.
    """
    resolve = Container.resolve_parse_tree
    num_resolutions = num_characters = 0

    def counted(self: Container, *arguments: Any, **others: Any) -> Any:
        nonlocal num_resolutions, num_characters
        num_resolutions += 1
        value = resolve(self, *arguments, **others)
        num_characters += len(value) if isinstance(value, str) else 0
        if num_resolutions > _MAX_RESOLUTIONS or num_characters > CONFIG_BYTES:
            raise _TooMuchError
        return value

    with _resolving:
        Container.resolve_parse_tree = counted  # type: ignore[method-assign]
        try:
            yield
        except _TooMuchError as error:
            raise ConfigError(
                f"{path}: interpolations (${{...}}) name one another too often: written out, they are over "
                f"{_MAX_RESOLUTIONS} values, or {CONFIG_BYTES} characters"
            ) from error
        finally:
            Container.resolve_parse_tree = resolve  # type: ignore[method-assign]


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


def _why(error: InterpolationResolutionError, key: str, config: dict[str, Any]) -> str:
    text = first_line(error).rpartition(" raised while resolving interpolation: ")[-1]
    if isinstance(error, InterpolationToMissingValueError):
        missing = text.rpartition(": ")[-1]
        return f"is made of {missing}, a missing value. Give one: {missing}=..."
    if isinstance(error, InterpolationKeyError) and (wrong := re.search(r"'(.+)' not found", text)):
        near = nearest(wrong[1], [path for path, _ in nodes(config) if path != key])
        return f"is made of {wrong[1]}, a key that is not there.{near} Name one that is there, or write a value."
    return text


def resolve_model_path(name: str) -> Path:
    """Return the local folder of a model in Hugging Face format.

    A relative name is looked up in the current directory, then in the project's root; a name of the hub's, then among
    what its client has downloaded.
    Raises ConfigError when no such folder with a `config.json` exists; model hubs are never asked.
    """
    return _resolve_folder(name, "config.json")


def is_folder_here(name: str) -> bool:
    """Whether there is a folder where `resolve_model_path` looks, whatever it holds. Raises ConfigError as that does
    for what is no path."""
    return any(candidate.is_dir() for candidate in _candidates(name))


def resolve_tokenizer_path(name: str) -> Path:
    """Return the local folder of a Hugging Face tokenizer, by the rules of `resolve_model_path`."""
    return _resolve_folder(name, "tokenizer_config.json")


def resolve_data_path(name: str) -> Path:
    """Return the file or folder with data, looked up in the current directory, then in the project's root.

    A path that begins with `hf://datasets/` is looked up among what the hub's client has downloaded.
    Raises ConfigError when there is none.
    """
    if name.startswith(HUB):
        return _downloaded_data(name)
    candidates = _candidates(name)
    for candidate in candidates:
        if candidate.exists():
            return candidate
    raise ConfigError(
        f"'{name}' is not there (looked in {', '.join(map(str, candidates))}).{_beside(candidates)} Give a local path."
    )


def path_of_quantization(name: str) -> str:
    """Return a configuration of quantization by its name, or the path of its file, by the rules of `resolve_data_path`,
    which raises ConfigError."""
    return name if name in NAMED else str(resolve_data_path(name).resolve())


def _downloaded_data(name: str) -> Path:
    hub_id, folder = hub_folder(name)
    snapshot = downloaded(hub_id, "dataset")
    if snapshot is not None and ".." not in folder and (snapshot / folder).exists():
        return snapshot / folder
    missing = "is not downloaded" if snapshot is None else f"has no {folder} in {snapshot}"
    raise ConfigError(
        f"'{shortened(hub_id)}' {missing} (looked in {cache_folder()}). Download it: "
        f"{how_to_download(shortened(hub_id), 'dataset')}, or give a local path."
    )


def _candidates(name: str) -> list[Path]:
    if not name.strip():
        raise ConfigError(EMPTY_PATH)
    if (
        "\0" in name
        or len(name) > _LONGEST_PATH
        or any(len(part.encode(errors="replace")) > 255 for part in name.split("/"))
    ):
        raise ConfigError(f"{shortened(repr(name))} is no path: it is too long, or has a null character.")
    path = Path(name).expanduser()
    return list(dict.fromkeys([Path.cwd() / path, PROJECT_ROOT / path]))


def _beside(candidates: Sequence[Path], is_one: Callable[[Path], bool] = Path.exists) -> str:
    return next(filter(None, (nearest_beside(candidate, is_one) for candidate in candidates)), "")


def _resolve_folder(name: str, required_file: str) -> Path:
    candidates = _candidates(name)
    for candidate in candidates:
        if (candidate / required_file).is_file():
            return candidate
    snapshot = downloaded(name, "model")
    if snapshot is not None and (snapshot / required_file).is_file():
        return snapshot
    if folder := next((candidate for candidate in candidates if candidate.is_dir()), None):
        raise ConfigError(f"the folder {folder} has no {required_file}. Is the download complete?")
    looked = ", ".join(str(candidate) for candidate in candidates)
    near = _beside(candidates, lambda folder: (folder / required_file).is_file())
    how = "Model hubs are not used: give the path of a downloaded folder."
    if is_hub_id(name):
        looked = f"{looked}, and the hub's downloads in {cache_folder()}"
        how = f"Nothing is downloaded by itself: {how_to_download(name, 'model')} does, or give the path of a folder."
    raise ConfigError(
        f"'{name}' is not a local Hugging Face folder with a {required_file} (looked in {looked}).{near} {how}"
    )


def files_of(path: Path) -> list[Path]:
    """A configuration's file and all that it names under `defaults:`, resolved. They can be loaded."""
    path = _inherited(str(path), Path())
    names = _defaults_of(_read_yaml(path, "").values, path)
    return [path.resolve(), *(each for name in names for each in files_of(_inherited(name, path)))]


def _inherited(name: str, heir: Path) -> Path:
    """The file of a name in another file, or of one that the user gives: beside it, else a shipped one."""
    beside, shipped = heir.parent / name, PROJECT_ROOT / name
    if not beside.exists():
        if shipped.is_file():
            return shipped
        if (moved := _in_moved_examples(name, heir)) is not None:
            return moved
    plain = Path(os.path.normpath(beside))
    return plain if plain.resolve() == beside.resolve() else beside  # behind a link, .. is another folder


def _in_moved_examples(name: str, heir: Path) -> Path | None:
    """A file below NeMo-RL's folder `examples`, by its name in another file there, where that folder is called
    otherwise."""
    _, is_below, rest = name.rpartition(f"../{BASE.parent.parent.name}/")
    candidates = [folder / rest for folder in heir.absolute().parents] if is_below else []
    return next((each for each in candidates if each.is_file()), None)


def _load_file(path: Path, including: tuple[Path, ...], num_files: "count[int]") -> LoadedConfig:
    chain = (*including, path)
    if next(num_files) > _MAX_FILES:
        raise ConfigError(f"{chain[0]}: defaults name over {_MAX_FILES} files, each as often as it is named")
    if path.resolve() in [ancestor.resolve() for ancestor in including]:
        raise ConfigError(f"defaults form a cycle: {' -> '.join(map(str, chain))}")
    own = _read_yaml(path, f" (included by {including[-1]})" if including else "")
    parts = [*(_load_file(_inherited(name, path), chain, num_files) for name in _defaults_of(own.values, path)), own]
    inherited: dict[str, Any] = reduce(merged, [part.values for part in parts[:-1]], {})
    origins = {key: origin for part in parts for key, origin in part.origins.items()}
    problems = [*(text for part in parts for text in part.problems), *_emptied(own, dict(nodes(inherited)), path)]
    return LoadedConfig(
        merged(inherited, own.values), origins, frozenset(origins.keys() - own.origins.keys()), problems
    )


def _emptied(own: LoadedConfig, inherited: Mapping[str, Any], path: Path) -> Iterator[str]:
    """What is wrong with sections of which a file has the name alone, all else being commented out, say."""
    lost = [key for key, value in nodes(own.values) if value is None and _is_section(inherited.get(key))]
    empty = empty_keys(read_text(path, CONFIG_BYTES)) if lost else ()
    for key in lost:
        if key in empty:
            yield (
                f"{key}: is empty, and would discard the {len(inherited[key])} key(s) that are inherited here. Leave "
                f"the line out, or write null to discard them. ({own.origins[key]})"
            )


def _is_section(value: Any) -> bool:
    return isinstance(value, dict) and bool(value)


def _read_yaml(path: Path, origin: str) -> LoadedConfig:
    if (inside := path / "config.yaml").is_file():
        raise ConfigError(f"{path}{origin}: is a folder, and no plain file. Did you mean '{inside}'?")
    try:
        text = read_text(path, CONFIG_BYTES)
        places, content = _checked(text, path)
    except OSError as error:
        hint = _near_file(path) if isinstance(error, FileNotFoundError) else ""
        raise ConfigError(f"{path}{origin}: cannot read the file: {error.strerror or error}.{hint}") from error
    except (yaml.YAMLError, ValueError, LookupError, TypeError, OverflowError) as error:
        raise as_document_error(error, path) from error
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {shortened(first_line(error))}") from error
    if not isinstance(content, dict) or (content and not places):  # OmegaConf takes text for a key
        what = "a list" if isinstance(content, list) else "a single value"
        raise ConfigError(f"{path}{origin}: the file must hold 'key: value' lines, not {what}")
    return LoadedConfig({str(key): value for key, value in content.items()}, places)


def _near_file(path: Path) -> str:
    """The file that is called almost so, in the folder that is named, here or among the shipped ones."""
    if "=" in path.name and path.suffix not in (".yaml", ".yml"):
        return " Keys are set behind the file: FILE KEY=VALUE."
    folders = dict.fromkeys([path.parent, PROJECT_ROOT / path.parent, BASE.parent])
    there = {file.stem: file for folder in reversed(folders) if folder.is_dir() for file in folder.glob("*.y*ml")}
    if not (match := get_close_matches(path.stem, sorted(there), n=1)):
        return ""
    file = there[match[0]]
    return f" Did you mean '{file.relative_to(PROJECT_ROOT) if file.is_relative_to(PROJECT_ROOT) else file}'?"


def _checked(text: str, path: Path) -> tuple[Mapping[str, str], Any]:
    """Places and values of a file's text. What is known of a text is kept."""
    places, values = _parse(text, path)
    return places, deepcopy(values)


@lru_cache(maxsize=64)
def _parse(text: str, path: Path) -> tuple[Mapping[str, str], Any]:
    check_yaml(text, path)
    for token in yaml.scan(text, Loader=YAML_LOADER) if "${" in text else ():
        if isinstance(token, yaml.ScalarToken) and _is_too_long(token.value):
            raise DocumentError(_TOO_LONG, path, token.start_mark.line + 1)
    places = places_of(text, str(path))
    try:
        return places, OmegaConf.to_container(OmegaConf.load(StringIO(text)))
    except OSError:  # OmegaConf's word for a number or a truth value alone
        return places, None


def _check_spelling(content: dict[str, Any], path: Path) -> None:
    """Raise ConfigError for a misspelt `defaults`, of which all other problems would follow."""
    known = {*keys_of(full_schema()), "defaults"}
    for key, value in content.items():
        is_near = get_close_matches(key.lower(), known, n=1) == ["defaults"]
        if is_near and key not in known and isinstance(value, str | list):
            raise ConfigError(
                f"{path}: {key}: unknown key. Did you mean 'defaults'? It names the file to inherit from."
            )


def _defaults_of(content: dict[str, Any], path: Path) -> list[str]:
    """Take `defaults` out of a file's content."""
    _check_spelling(content, path)
    defaults = content.pop("defaults", [])
    names = [defaults] if isinstance(defaults, str) else defaults
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        given = shortened(repr(defaults))
        raise ConfigError(f"{path}: defaults: give a file name or a list of file names, not {given}")
    if nul := next((name for name in names if "\0" in name), None):
        raise ConfigError(f"{path}: defaults: {nul!r} has a null character, which no file's name has")
    return names
