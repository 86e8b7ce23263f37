"""Algorithms and environments by name: the package's own, and those of other distributions.

Another distribution names an `AlgorithmSpec` or an `EnvironmentSpec` as an entry point of the group
`nemo_rl_offload.plugins`. Python's metadata tells who is installed, so no configuration lists modules to import, and
every process finds the same: the command line, a check, and workers under Ray. Entry points are loaded at the first
look into a registry, once. A plugin's module is imported for every command, and so should import neither torch nor Ray:
what needs them is named as `"module:name"` and imported when it runs.
"""

import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from nemo_rl_offload.errors import ConfigError

GROUP = "nemo_rl_offload.plugins"


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What is registered; the package's own have their sections in the schema."""

    name: str
    section: type | None = None
    """Of a plugin: the TypedDict of its section, under its name, whose keys have defaults (`config.types.Default`)."""


class Registry[S: Spec](Mapping[str, S]):
    """Specs by name: `built_in`, then `plugins`. Any look but at `built_in` raises ConfigError for a broken plugin."""

    def __init__(self, kind: type[S], built_in: Iterable[S]) -> None:
        self._kind = kind
        self.built_in: dict[str, S] = {spec.name: spec for spec in built_in}

    @property
    def plugins(self) -> dict[str, S]:
        """Those of other distributions."""
        return {spec.name: spec for spec in plugin_specs() if isinstance(spec, self._kind)}

    def __getitem__(self, name: str) -> S:
        return self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def _all(self) -> dict[str, S]:
        plugins = self.plugins
        if taken := next((name for name in plugins if name in self.built_in), None):
            raise ConfigError(f"plugin: the name {taken} is taken by this package's own. Give another name.")
        return self.built_in | plugins


@cache
def plugin_specs() -> tuple[Spec, ...]:
    """Load all entry points of the group. Raises ConfigError, which names the plugin."""
    specs = [_load(entry) for entry in entry_points(group=GROUP)]
    names = [(type(spec), spec.name) for spec in specs]
    if twice := next((name for kind, name in names if names.count((kind, name)) > 1), None):
        raise ConfigError(f"plugin: two plugins have the name {twice}. Uninstall one, or give it another name.")
    return tuple(specs)


def _load(entry: EntryPoint) -> Spec:
    source = f"plugin {entry.name} ({entry.value}{f' of {entry.dist.name}' if entry.dist else ''})"
    try:
        spec = entry.load()
    except Exception as error:
        raise _import_error(f"{source}: does not import", error) from error
    if not isinstance(spec, Spec):
        raise ConfigError(f"{source}: is {type(spec).__name__}, not an AlgorithmSpec or an EnvironmentSpec.")
    if spec.section is None:
        raise ConfigError(f"{source}: gives no section. Set section to the TypedDict of its configuration.")
    return spec


def import_object(path: str) -> Any:
    """Import what a path such as `"package.module:name"` names. Raises ConfigError where it does not import."""
    module, _, name = path.partition(":")
    try:
        return getattr(import_module(module), name)
    except Exception as error:
        raise _import_error(f"{path}: does not import", error) from error


def _import_error(problem: str, error: Exception) -> ConfigError:
    failure = ConfigError(f"{problem}: {type(error).__name__}: {error}. Mend it, or uninstall its distribution.")
    failure.details = traceback.format_exc()
    return failure
