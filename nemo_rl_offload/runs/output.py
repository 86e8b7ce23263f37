"""Where a command writes what it worked for: whether that can be written is found out before the work."""

import errno
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile

from nemo_rl_offload.errors import ConfigError, ResourceError, where_else


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
            path.write_text(text, encoding="utf-8")
        return
    with written_aside(path.resolve() if path.is_symlink() else path) as aside:
        aside.write_text(text, encoding="utf-8")


def _is_device(path: Path) -> bool:
    return path.exists() and not path.is_file() and not path.is_dir()


def partial_of(folder: Path) -> Path:
    """Where a folder is written that is to appear whole or not at all."""
    return folder.with_name(f"{folder.name}.partial")


@contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """A name to write to, which becomes `path` when all is written.

    Raises:
        ResourceError: the file cannot be written; what `path` held before is still there.
    """
    aside = path.with_name(f"{path.name}.part")
    with _cannot_write(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield aside
            os.replace(aside, path)
        finally:
            aside.unlink(missing_ok=True)


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
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with writing_in_run(path):
        try:
            with temporary.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


@contextmanager
def writing_in_run(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise ResourceError(
            f"Cannot write {path}: {reason}. {where_else(error, 'choose another folder with --run-dir')}"
        ) from error


def without_nan(obj: object) -> object:
    if isinstance(obj, float):
        return obj if math.isfinite(obj) else None
    if isinstance(obj, Mapping):
        return {key: without_nan(value) for key, value in obj.items()}
    if isinstance(obj, list | tuple):
        return [without_nan(value) for value in obj]
    return obj
