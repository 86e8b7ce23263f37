"""Errors meant for the user: the message says it all, so the command line prints it without a traceback."""

import errno
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import Any


class NemoRLOffloadError(Exception):
    """Base of every error that a user can cause or must act on."""

    details: str = ""
    """The original traceback where the error happened in another process; for a log file, not for the screen."""


class ConfigError(NemoRLOffloadError, ValueError):
    """One or several problems in the configuration, one per line."""

    problems: Sequence[Mapping[str, str]] = ()
    """The same with `path`, `message` and `origin` apart, where they are known."""


class DataError(NemoRLOffloadError, ValueError):
    """Data that cannot be used as configured."""


class CheckpointError(NemoRLOffloadError):
    """A checkpoint that is missing, damaged or does not fit the run."""


class TrainingError(NemoRLOffloadError):
    """Training cannot go on as configured, though every part of it works."""


class WorkerError(NemoRLOffloadError):
    """A worker failed; the message holds its rank and the original message."""


class ResourceError(NemoRLOffloadError):
    """The machine or cluster lacks something: devices, memory, disk space."""


def shortened(text: str) -> str:
    """At most 200 characters of it."""
    return text if len(text) <= 200 else f"{text[:197]}..."


def first_line(error: Exception) -> str:
    """Of an error's message."""
    return str(error).splitlines()[0]


def nearest(name: str, allowed: Iterable[str]) -> str:
    """Return ``" Did you mean 'x'?"`` for the closest of ``allowed``, or ``""`` when none is close."""
    matches = get_close_matches(name, list(allowed), n=1)
    return f" Did you mean '{matches[0]}'?" if matches else ""


def nearest_beside(path: Path, is_one: Callable[[Path], bool] = Path.exists) -> str:
    """Return as `nearest` does what is called almost as ``path`` in its folder."""
    try:
        return nearest(path.name, (each.name for each in islice(path.parent.iterdir(), 10_000) if is_one(each)))
    except OSError:
        return ""


def where_else(error: Exception, alternative: str) -> str:
    """Return what to do where something cannot be written: `alternative`, or to make room, if that is what failed."""
    is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return f"Free some space there, or {alternative}." if is_full else f"{alternative[0].upper()}{alternative[1:]}."


def all_or_none(*readers: Callable[[], Any]) -> list[Any]:
    """Return what each of the readers returns. Raises what all of them raised as one error, of the first one's kind;
    the line that the last ends with is not said before."""
    found: list[Any] = []
    errors: list[NemoRLOffloadError] = []
    for read in readers:
        try:
            found.append(read())
        except NemoRLOffloadError as error:
            errors.append(error)
    if errors:
        *others, last = map(str, errors)
        advice = f"\n{last.rpartition('\n')[2]}"
        raise type(errors[0])("\n".join([*(each.removesuffix(advice) for each in others), last]))
    return found
