"""Sizes and checksums of a checkpoint's files, so that a truncated or altered one is told from a whole one; and how
these files are opened.

A checkpoint may come from elsewhere. Its manifest names files of its own folder alone, and none of them is opened by
way of a link: each part of a name is opened without following one, and what was opened has to be a plain file. To look
at the name first and open it then would leave a moment in which it can be exchanged. The folder itself is its caller's
to look at: of a run, only the run directory may be reached by a link, as by one to another disk. Checksums find damage;
whoever changes a file can change the manifest too, so that nothing here says that the content is harmless
(`megatron.checkpoint.reader` sees to that).
"""

import errno
import hashlib
import io
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, TypedDict

from pydantic import Field, TypeAdapter, ValidationError

from nemo_rl_offload.errors import CheckpointError
from nemo_rl_offload.specs.documents import RUN_BYTES, DocumentError, parse_json
from nemo_rl_offload.specs.plain_file import open_plain_file
from nemo_rl_offload.units import human_bytes

_NAME = r"^[^/\x00-\x1f]{1,255}(/[^/\x00-\x1f]{1,255})?$"


class FileDigest(TypedDict):
    """What a file must be."""

    bytes: Annotated[int, Field(ge=0, lt=1 << 63)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


Manifest = dict[str, FileDigest]
"""By path relative to the checkpoint's folder."""
_MANIFEST = TypeAdapter(dict[Annotated[str, Field(pattern=_NAME)], FileDigest])


def open_inside(folder: Path, name: str) -> io.BufferedReader:
    """Open a plain file for reading by its path relative to a folder, without following links below that.

    Raises:
        OSError: it is none, or cannot be read; `strerror` says why.
    """
    parts = name.split("/")
    if any(part in ("", ".", "..") for part in parts):
        raise OSError(errno.EINVAL, "it names no file inside of the folder")
    where = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for depth, part in enumerate(parts, start=1):
            inner = open_plain_file(part, folder=where, wants_folder=depth < len(parts))
            os.close(where)
            where = inner
    except BaseException:
        os.close(where)
        raise
    return open(where, "rb")


def read_checkpoint_json[T](folder: Path, name: str, kind: TypeAdapter[T]) -> T:
    """A JSON file of a checkpoint, which is what its type says.

    Raises:
        CheckpointError: it is not, cannot be read, or is far too large.
    """
    try:
        with open_inside(folder, name) as file:
            content = file.read(RUN_BYTES + 1)
        if len(content) > RUN_BYTES:
            raise CheckpointError(f"{folder} is damaged: {name} has more than {human_bytes(RUN_BYTES)}.")
        return kind.validate_python(parse_json(content.decode()))
    except OSError as error:
        reason = error.strerror or str(error)
    except UnicodeDecodeError:
        reason = "it is not UTF-8 text"
    except DocumentError as error:
        reason = f"it {error.reason[:200]}"
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = _shortened(".".join(map(str, first["loc"])))
        reason = f"{place}: {first['msg']}" if place else first["msg"]
    raise CheckpointError(f"{folder} is damaged: {name} cannot be read: {reason}.")


def _shortened(text: str) -> str:
    return repr(text[:80] + "..." if len(text) > 80 else text) if text else ""


def read_manifest(folder: Path, name: str) -> Manifest:
    """The manifest of a checkpoint. Raises CheckpointError: it is none, or names files outside of the folder."""
    manifest = read_checkpoint_json(folder, name, _MANIFEST)
    for path in manifest:
        if {".", ".."} & {*path.split("/")}:
            raise CheckpointError(f"{folder} is damaged: {name} names {path!r}, which is outside of the folder.")
    return manifest


def file_digest(path: Path) -> FileDigest:
    """Size and checksum of a file, which is on the disk afterwards, whatever happens to the machine."""
    with open_inside(path.parent, path.name) as file:
        os.fsync(file.fileno())
        return {"bytes": os.fstat(file.fileno()).st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def check_sizes(folder: Path, manifest: Mapping[str, FileDigest]) -> None:
    """Raise CheckpointError for the first file that is missing, no plain file, or of another size; reads none."""
    for name, expected in manifest.items():
        try:
            with open_inside(folder, name) as file:
                num_bytes = os.fstat(file.fileno()).st_size
        except FileNotFoundError as error:
            raise CheckpointError(f"{folder} is damaged: {name} is missing.") from error
        except OSError as error:
            raise _unreadable(folder, name, error) from error
        if num_bytes != expected["bytes"]:
            raise CheckpointError(f"{folder} is damaged: {name} has {num_bytes} bytes instead of {expected['bytes']}.")


def check_contents(folder: Path, manifest: Mapping[str, FileDigest], names: Iterable[str]) -> None:
    """Raise CheckpointError for the first of these files whose checksum is another."""
    for name in names:
        try:
            with open_inside(folder, name) as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise _unreadable(folder, name, error) from error
        if found != manifest[name]["sha256"]:
            raise CheckpointError(f"{folder} is damaged: the content of {name} is not what was written.")


def _unreadable(folder: Path, name: str, error: OSError) -> CheckpointError:
    return CheckpointError(f"{folder} is damaged: {name} cannot be read: {error.strerror or error}.")
