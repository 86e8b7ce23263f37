"""The schema with what plugins add: their sections, and their names among the allowed values.

`MasterConfig` is what the code is checked against by types, and has the package's own sections. Without plugins it is
the whole schema.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Literal, TypedDict, get_args

from nemo_rl_offload.config.algorithms import ALGORITHMS
from nemo_rl_offload.config.environments import ENVIRONMENTS
from nemo_rl_offload.config.schema import MasterConfig
from nemo_rl_offload.config.types import closed, defaults_of, item_type, keys_of
from nemo_rl_offload.errors import ConfigError, nearest


@cache
def full_schema() -> Any:
    """`MasterConfig`, or a type with its keys and those of plugins. Raises ConfigError for a plugin that is broken."""
    if not (ALGORITHMS.plugins or ENVIRONMENTS.plugins):
        return MasterConfig
    if taken := next((name for name in ALGORITHMS.plugins if name in keys_of(MasterConfig)), None):
        raise ConfigError(f"plugin: the name {taken} is that of another section. Give another name.")
    metrics = get_args(keys_of(keys_of(MasterConfig)["checkpointing"])["metric_name"])
    of_plugins = [metric for spec in ALGORITHMS.plugins.values() for metric in spec.metrics]
    return _with_keys(
        MasterConfig,
        {
            "algorithm": Literal[tuple(ALGORITHMS)],
            **{name: spec.section for name, spec in ALGORITHMS.plugins.items()},
            "data": {"env_name": Literal[tuple(ENVIRONMENTS)]},
            "env": {name: spec.section for name, spec in ENVIRONMENTS.plugins.items()},
            "checkpointing": {"metric_name": Literal[tuple(dict.fromkeys([*metrics, *of_plugins]))]},
        },
    )


def plugin_defaults() -> dict[str, Any]:
    """The values of plugins' sections, which `base.yaml` cannot hold."""
    of_algorithms, of_environments = (
        {name: defaults_of(spec.section) for name, spec in registry.plugins.items()}
        for registry in (ALGORITHMS, ENVIRONMENTS)
    )
    return of_algorithms | ({"env": of_environments} if of_environments else {})


def _with_keys(section: type, changes: Mapping[str, Any]) -> Any:
    """A section like another with other types of some keys; a mapping changes the section of that name."""
    keys = keys_of(section)
    for key, change in changes.items():
        keys[key] = _with_keys(keys[key], change) if isinstance(change, Mapping) else change
    make: Any = TypedDict
    return closed(make(section.__name__, keys))


def section_at(path: Sequence[str]) -> Any:
    """Return the annotation of a section, None where the schema has none."""
    annotation: Any = full_schema()
    for part in path:
        annotation = keys_of(annotation).get(part, item_type(annotation, dict))
    return annotation


def may_be_added(key: str, section: Any) -> bool:
    """Whether the schema takes this key there: it is one of the section's, or the section takes any."""
    return key in keys_of(section) or section is Any or item_type(section, dict) is not None


def right_place(key: str, section: Any) -> str:
    """Return the nearest key of the section, else the section of another place that has this very key."""
    return nearest(key, keys_of(section)) or next(
        (f" It belongs to {path}." for path, keys in _sections(full_schema(), "") if path and key in keys), ""
    )


def _sections(annotation: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    keys = keys_of(annotation)
    yield path, keys
    for key, child in keys.items():
        yield from _sections(child, f"{path}.{key}".lstrip("."))
