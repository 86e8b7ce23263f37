"""Where a command writes what it worked for: whether that can be written is found out before the work."""

import errno
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import BinaryIO

from nemo_rl_offload.errors import ConfigError, NemoRLOffloadError, ResourceError, where_else
from nemo_rl_offload.runs.plain_files import Place, open_to_append_lines, written_anew


def make_writable(folder: Path, given: str) -> None:
    """Make the folder, and write a file there for a moment.

    Raises:
        ConfigError: that fails; the message begins with `given`, what the user wrote.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=folder, buffering=0) as file:
            file.write(b"0")
    except OSError as error:
        raise ConfigError(f"{given}: cannot write to {folder}: {error.strerror}. Name another folder.") from error


def check_writable(path: Path, given: str) -> None:
    """Find out whether `write_text` could write a file.

    Raises:
        ConfigError: it could not; the message begins with `given`, what the user wrote.
    """
    target = path.resolve()
    try:
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not _is_device(target):
            with NamedTemporaryFile(dir=target.parent, buffering=0) as file:
                file.write(b"0")
    except OSError as error:
        raise ConfigError(f"{given}: cannot be written: {error.strerror}. Name another file.") from error


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all; to a device or a pipe as it comes.

    Raises:
        ResourceError: the file cannot be written; what it held before is still there.
    """
    if _is_device(path):
        with _cannot_write(path):
            path.write_text(text, encoding="utf-8", errors="backslashreplace")
        return
    with written_aside(path.resolve() if path.is_symlink() else path) as file:
        file.write(text.encode(errors="backslashreplace"))


def _is_device(path: Path) -> bool:
    return path.exists() and not path.is_file() and not path.is_dir()


def partial_of(folder: Path) -> Path:
    """Where a folder is written that is to appear whole or not at all."""
    return folder.with_name(f"{folder.name}.partial")


@contextmanager
def written_aside(path: Path, *, replaces_links: bool = True) -> Iterator[BinaryIO]:
    """A file that becomes `path` when all is written; without `replaces_links`, no link or pipe may stand there.

    Raises:
        ResourceError: it cannot be written; what `path` held before is still there.
    """
    with _cannot_write(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_anew(path, replaces_links=replaces_links) as file:
            yield file


@contextmanager
def _cannot_write(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ResourceError(
            f"Cannot write {path}: {error.strerror or error}. {where_else(error, 'name another folder')}"
        ) from error


def write_json_atomic(path: Path, obj: object) -> None:
    """Write ``obj`` as JSON so that ``path`` holds the old text or the whole new one, also after a power cut.

    Numbers that are not finite become null.

    Raises:
        ResourceError: the file cannot be written; what ``path`` held before is still there.
    """
    text = json.dumps(without_nan(obj), indent=2, allow_nan=False) + "\n"
    with writing_in_run(path), written_anew(path, is_durable=True) as file:
        file.write(text.encode())


@contextmanager
def writing_in_run(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise ResourceError(
            f"Cannot write {path}: {reason}. {where_else(error, 'choose another folder with --run-dir')}"
        ) from error


class OptionalLog:
    """A log that a run can do without: that a line could not be written there is told once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._has_failed = False

    def append(self, text: str) -> list[str]:
        """Add to the log; returns what the user should hear of that, which is mostly nothing."""
        try:
            with open_to_append_lines(self._path) as file:
                file.write(text.encode("utf-8", errors="backslashreplace"))
        except OSError as error:
            told, self._has_failed = self._has_failed, True
            reason = error.strerror or error
            return [] if told else [f"{self._path}: cannot be written: {reason}. The run goes on without it."]
        return []


class RunFolder:
    """The folder of a run that is at work. Raises ResourceError where it is not there."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        with writing_in_run(run_dir):
            self._place = Place(run_dir)

    def is_there(self) -> bool:
        """Whether the folder was neither removed nor moved meanwhile, and no other one has its name."""
        return self._place.is_same()

    def check(self) -> None:
        """Raise RunFolderGoneError where it is not there."""
        if not self.is_there():
            raise RunFolderGoneError(
                f"{self._run_dir}: the run directory was removed, moved or replaced while the run was at work, so that "
                "nothing more can be kept there. Bring it back, and start the run again."
            )

    @contextmanager
    def written_to(self) -> Iterator[None]:
        """Around writing there: what fails because the folder is gone is told as that. Raises RunFolderGoneError."""
        self.check()
        try:
            yield
        except NemoRLOffloadError:
            self.check()
            raise


class RunFolderGoneError(ResourceError):
    """What stands at the run directory's name is not the run's, and nothing is written there."""


def without_nan(obj: object) -> object:
    if isinstance(obj, float):
        return obj if math.isfinite(obj) else None
    if isinstance(obj, Mapping):
        return {
            key if isinstance(key, str | int | float | None) else str(key): without_nan(value)
            for key, value in obj.items()
        }
    if isinstance(obj, list | tuple):
        return [without_nan(value) for value in obj]
    return obj
