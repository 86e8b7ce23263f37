"""Files that `nemo-rl-offload plan` writes: where they may stand, and what of a configuration goes into them."""

import argparse
import contextlib
import gc
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from nemo_rl_offload.config.loader import files_of
from nemo_rl_offload.config.recipe import read_recipe
from nemo_rl_offload.config.sources import OVERRIDE, LoadedConfig
from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.runs.output import check_writable
from nemo_rl_offload.runs.run_directory import check_not_of_run


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Do something without Python's collector, which looks through a simulation's times again and again: a fifth of all
    time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def check_targets(options: argparse.Namespace) -> None:
    """Raises ConfigError for a file to write that is read, cannot be written, or is named twice."""
    targets = {name: path for name in ("--write", "--html") if (path := getattr(options, name[2:])) is not None}
    for name, path in targets.items():
        if path.resolve() in files_of(options.config):
            raise ConfigError(f"{path}: the configuration is read from it, and would be lost. Give another name.")
        check_not_of_run(path)
        check_writable(path, f"{name} {path}")
    if len({path.resolve() for path in targets.values()}) < len(targets):
        raise ConfigError(f"--write {targets['--write']}: --html would write over it. Give two names.")


def given_words(options: argparse.Namespace, overrides: Sequence[str]) -> list[str]:
    """The device, the memory and the overrides of a plan, as they were given."""
    memory = [] if options.memory is None else ["--memory", str(options.memory)]
    return ["--gpu", str(options.gpu), *memory, *overrides]


def changed_values(written: LoadedConfig, config: Path, overrides: Sequence[str]) -> dict[str, object]:
    """What a file that inherits `config` has to say to be what is `written`, in its sections; lists count as a whole.

    A value that an override gives belongs to it, also where it is the one there was: in the file that may be made of
    others, which are changed. Raises ConfigError for overrides that remove a key.
    """
    if removed := [text for text in overrides if text.startswith("~")]:
        raise ConfigError(
            f"--write: {removed[0]} removes a key, which no file can do that inherits. Remove it in a copy of "
            f"{config}, and plan that."
        )
    return _difference(written.values, read_recipe(config).values, written.origins, "")


def _difference(
    new: Mapping[str, object], old: Mapping[str, object], origins: Mapping[str, str], above: str
) -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in new.items():
        before, path = old.get(key), f"{above}{key}"
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            if inner := _difference(value, before, origins, f"{path}."):
                found[key] = inner
        elif key not in old or value != before or origins.get(path) == OVERRIDE:
            found[key] = value
    return found
