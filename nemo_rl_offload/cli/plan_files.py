"""Files that `nemo-rl-offload plan` writes: where they may stand, and what of a configuration goes into them."""

import argparse
import contextlib
import gc
from collections.abc import Iterator, Mapping

from nemo_rl_offload.config.loader import files_of
from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.runs.output import check_writable


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
        check_writable(path, f"{name} {path}")
    if len({path.resolve() for path in targets.values()}) < len(targets):
        raise ConfigError(f"--write {targets['--write']}: --html would write over it. Give two names.")


def difference(new: Mapping[str, object], old: Mapping[str, object]) -> dict[str, object]:
    """What of `new` is not in `old`, in sections as there; lists count as a whole."""
    found: dict[str, object] = {}
    for key, value in new.items():
        before = old.get(key)
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            if inner := difference(value, before):
                found[key] = inner
        elif key not in old or value != before:
            found[key] = value
    return found
