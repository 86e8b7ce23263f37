"""Where each value of a configuration was written: file and line, or an override on the command line.

Values and places are kept apart: values stay plain dicts and lists that any code can read, and places are looked up by
a value's path only when something is to be said about it.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from nemo_rl_offload.specs.documents import YAML_LOADER

OVERRIDE = "override on the command line"
"""The place of what an override gave or removed."""
_REFERENCE = re.compile(r"\$\{(\w[\w.]*)\}")
NULL_TAG, NULL_KEY = "tag:yaml.org,2002:null", "a key is null. Give it a name, or write it in quotes"
UNGIVEN = "???"
"""OmegaConf's mark for a value that must be given."""


@dataclass(frozen=True)
class LoadedConfig:
    """A configuration after inheritance, overrides and interpolation, not yet checked."""

    values: dict[str, Any]
    """Plain dicts and lists; missing values (`???`) stay for `check_config` to report."""
    origins: Mapping[str, str] = field(default_factory=dict)
    """``"file:line"`` or `OVERRIDE` of each key and list item, by its path."""
    inherited: frozenset[str] = frozenset()
    """Paths of keys that stand in a file which another one names under `defaults:`, and neither in that one nor in an
    override."""
    problems: list[str] = field(default_factory=list)
    """Overrides that do not apply, and sections that are empty, one line each."""
    unresolved: Mapping[str, str] = field(default_factory=dict)
    """Why interpolations could not be resolved, by the path of the value, which is then `UNGIVEN`."""
    references: Mapping[str, list[str]] = field(default_factory=dict)
    """The paths that a value was made of by interpolation, by its own path."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """What is wrong with keys that the schema does not have, by path."""
    without_effect: Mapping[str, str] = field(default_factory=dict)
    """Why a key of NeMo-RL's has no effect here, by its path."""
    notes: Sequence[str] = ()
    """Warnings of the translation; each begins with a path."""
    is_recipe: bool = False
    """Whether it has keys that only NeMo-RL knows."""
    is_evaluation: bool = False
    """Whether it is one of NeMo-RL's `run_eval`, which trains nothing."""

    def origin(self, path: str) -> str:
        """Where the value was written; of a missing one, its section; ``""`` where neither is known."""
        while path and path not in self.origins:
            path = path.rpartition(".")[0]
        return self.origins.get(path, "")


def nodes(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield path and value of every key and list item below ``node``."""
    children = node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list) else ()
    for key, child in children:
        inner = f"{path}.{key}" if path else str(key)
        yield inner, child
        yield from nodes(child, inner)


def places_of(text: str, file: str) -> Mapping[str, str]:
    """Return ``"file:line"`` of each key and list item of YAML, by its path.

    The text went through `documents.check_yaml`. Raises YAMLError for a key that is null.
    """
    written = _written(yaml.compose(text, Loader=YAML_LOADER), "")
    return {path: f"{file}:{place.start_mark.line + 1}" for path, place, _ in written}


def empty_keys(text: str) -> frozenset[str]:
    """Return the paths of YAML's keys behind which nothing stands, not even null."""
    written = _written(yaml.compose(text, Loader=YAML_LOADER), "")
    return frozenset(path for path, _, child in written if child.tag == NULL_TAG and not child.value)


def _written(node: Any, path: str) -> Iterator[tuple[str, yaml.Node, yaml.Node]]:
    """Path, key and value of each; of list items the value twice."""
    if isinstance(node, yaml.MappingNode):
        children = [(key.value, key, child) for key, child in node.value]
    elif isinstance(node, yaml.SequenceNode):
        children = [(index, child, child) for index, child in enumerate(node.value)]
    else:
        return
    for name, place, child in children:
        if isinstance(node, yaml.MappingNode) and place.tag == NULL_TAG:
            raise yaml.MarkedYAMLError(problem=NULL_KEY, problem_mark=place.start_mark)
        inner = f"{path}.{name}" if path else str(name)
        yield inner, place, child
        yield from _written(child, inner)


def merged(old: Any, new: Any) -> Any:
    """Mappings together, key by key; of all else, and with `_override_`, the newer."""
    if not isinstance(new, dict):
        return new
    kept = old if isinstance(old, dict) and not new.get("_override_") else {}
    return kept | {key: merged(kept.get(key), value) for key, value in new.items() if key != "_override_"}


def references(written: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the paths that each value refers to, before interpolation."""
    texts = {path: text for path, text in nodes(written) if isinstance(text, str) and "${" in text}
    return {path: _REFERENCE.findall(text) for path, text in texts.items()}


def final_origins(
    written: Mapping[str, Any], origins: Mapping[str, str], unresolved: Iterable[str] = ()
) -> dict[str, str]:
    """Return the origins of what is left after inheritance; a value that only refers to another has that one's too.

    ``written`` are the values before interpolation, which run in circles only through what is ``unresolved``.
    """
    values = dict(nodes(written)) | dict.fromkeys(unresolved)
    places = {path: origin for path, origin in origins.items() if path in values or origin == OVERRIDE}
    found = dict(places)
    for path in values:
        target = path
        while isinstance(text := values.get(target), str) and (reference := _REFERENCE.fullmatch(text)):
            target = reference[1]
        if target != path and {path, target} <= places.keys():
            found[path] = f"{places[path]}, from {places[target]}"
    return found
