"""The schema with what plugins add: their sections, and their names among the allowed values.

`MasterConfig` is what the code is checked against by types, and has the package's own sections. Without plugins it is
the whole schema.
"""

from collections.abc import Mapping
from copy import deepcopy
from functools import cache
from typing import Annotated, Any, Literal, TypedDict, get_args, get_origin

from nemo_rl_offload.config.algorithms import ALGORITHMS
from nemo_rl_offload.config.environments import ENVIRONMENTS
from nemo_rl_offload.config.schema import MasterConfig
from nemo_rl_offload.config.types import closed, keys_of
from nemo_rl_offload.errors import ConfigError


@cache
def full_schema() -> Any:
    """`MasterConfig`, or a type with its keys and those of plugins. Raises ConfigError for a plugin that is broken."""
    if not (ALGORITHMS.plugins or ENVIRONMENTS.plugins):
        return MasterConfig
    if taken := next((name for name in ALGORITHMS.plugins if name in keys_of(MasterConfig)), None):
        raise ConfigError(f"plugin: the name {taken} is that of another section. Give another name.")
    metrics = [metric for spec in ALGORITHMS.values() for metric in spec.metrics]
    return _with_keys(
        MasterConfig,
        {
            "algorithm": Literal[tuple(ALGORITHMS)],
            **{name: spec.section for name, spec in ALGORITHMS.plugins.items()},
            "data": {"env_name": Literal[tuple(ENVIRONMENTS)]},
            "env": {name: spec.section for name, spec in ENVIRONMENTS.plugins.items()},
            "checkpointing": {"metric_name": Literal[tuple(_metric_names(metrics))]},
        },
    )


def plugin_defaults() -> dict[str, Any]:
    """The values of plugins' sections, which `base.yaml` cannot hold."""
    of_algorithms, of_environments = (
        {name: deepcopy({**spec.defaults}) for name, spec in registry.plugins.items()}
        for registry in (ALGORITHMS, ENVIRONMENTS)
    )
    return of_algorithms | ({"env": of_environments} if of_environments else {})


def _metric_names(metrics: list[str]) -> list[str]:
    known = get_args(_plain(keys_of(keys_of(MasterConfig)["checkpointing"])["metric_name"]))
    return list(dict.fromkeys([*known, *metrics]))


def _with_keys(section: type, changes: Mapping[str, Any]) -> Any:
    """A section like another with other types of some keys; a mapping changes the section of that name."""
    keys = keys_of(section)
    for key, change in changes.items():
        new = _with_keys(keys[key], change) if isinstance(change, Mapping) else change
        old: Any = keys.get(key)
        keys[key] = Annotated[(new, *old.__metadata__)] if get_origin(old) is Annotated else new
    make: Any = TypedDict
    return closed(make(section.__name__, keys))


def _plain(annotation: Any) -> Any:
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation
