"""Files in a folder that others may have filled: a run directory out of an archive, or on a disk that many share.

At a name where a run writes there may stand a link, a second name of somebody's file, or a pipe. Opened as usual, the
link's target is overwritten, the other name's file grows, and the pipe waits for ever. So

- what is read or appended to is opened without following a link and without waiting, and looked at when it is open: it
  must be a plain file, and for appending it must have no other name;
- what is written whole is made anew beside its name, which nobody else can have made, and renamed;
- a folder is one of its own, for things are also removed there.

Everything else is refused by name. Rejected: to ask by `lstat` and open afterwards, between which the file can be
exchanged; and to follow links that stay in the run directory, for `.lock` may lead to `config.yaml`.

The limits: only the last part of a path is looked at, since a run directory may itself be reached by a link of the
user's; and whoever exchanges folders while the run is at work is not kept out.
"""

import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from nemo_rl_offload.specs.plain_file import NotPlainError, fault_of, open_plain_file


def why_not_plain(path: Path, *, may_have_other_names: bool) -> str | None:
    """Why no file can be written at `path`; None where there is a plain one, or nothing. Raises OSError."""
    try:
        return fault_of(os.lstat(path), may_have_other_names=may_have_other_names)
    except FileNotFoundError:
        return None


def why_no_folder(path: Path) -> str | None:
    """Why no folder can be made use of at `path`; None where there is one, or nothing. Raises OSError."""
    try:
        return fault_of(os.lstat(path), wants_folder=True)
    except FileNotFoundError:
        return None


def is_folder(path: Path) -> bool:
    """Whether a folder stands at `path` itself, which cannot be removed as a file can."""
    return path.is_dir() and not path.is_symlink()


def read_plain(path: Path) -> bytes:
    """The content of a file. Raises OSError, and NotPlainError where it is none."""
    with open(open_plain_file(path), "rb") as file:
        return file.read()


def open_to_append(path: Path) -> BinaryIO:
    """A file to append to, made where there is none. Raises OSError, NotPlainError."""
    return open(open_plain_file(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, may_have_other_names=False), "ab")


def open_to_append_lines(path: Path) -> BinaryIO:
    """As `open_to_append`, for lines: a last one that a kill cut off becomes a line of its own."""
    file = open(open_plain_file(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, may_have_other_names=False), "ab")  # noqa: SIM115
    try:
        size = os.fstat(file.fileno()).st_size
        if size and os.pread(file.fileno(), 1, size - 1) != b"\n":
            file.write(b"\n")
            file.flush()
    except OSError:
        with suppress(OSError):
            file.close()
        raise
    return file


def aside_of(path: Path) -> Path:
    """Where a file is written that is to appear whole or not at all."""
    return path.with_name(f".{path.name}.part")


@contextmanager
def written_anew(path: Path, *, replaces_links: bool = False, is_durable: bool = False) -> Iterator[BinaryIO]:
    """A file that becomes `path` when all is written.

    Args:
        replaces_links: also takes the place of a link or a pipe.
        is_durable: is on the disk afterwards, whatever happens to the machine.

    Raises:
        OSError: it cannot be written; what `path` held before is still there.
        NotPlainError: something else stands there, or a folder at the name aside.
    """
    if not replaces_links and (what := why_not_plain(path, may_have_other_names=True)):
        raise NotPlainError(path, what)
    aside = aside_of(path)
    if is_folder(aside):
        raise NotPlainError(aside, f"it is first written as {aside.name}, which is a folder")
    aside.unlink(missing_ok=True)  # of a process that was killed, or what somebody has put there
    try:
        with open(open_plain_file(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
            yield file
            if is_durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    if is_durable:
        _sync_folder(path.parent)


def _sync_folder(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def make_folder(path: Path) -> None:
    """Make a folder where there is none; those above it are there. Raises OSError, NotPlainError."""
    if what := why_no_folder(path):
        raise NotPlainError(path, what)
    path.mkdir(exist_ok=True)


class Place:
    """A file or folder, to find out later whether it still stands at its name. Raises OSError.

    It is held open, or another one could get its number as soon as it is removed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        weakref.finalize(self, os.close, descriptor)
        self._then = os.fstat(descriptor)

    def is_same(self) -> bool:
        """Whether it is there, and no other at its name."""
        try:
            return os.path.samestat(os.stat(self._path), self._then)
        except OSError:
            return False
