"""Sizes and checksums of a checkpoint's files, so that a truncated or altered one is told from a whole one."""

import hashlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypedDict

from nemo_rl_offload.errors import CheckpointError


class FileDigest(TypedDict):
    """What a file must be."""

    bytes: int
    sha256: str


Manifest = dict[str, FileDigest]
"""By path relative to the checkpoint's folder."""


def file_digest(path: Path) -> FileDigest:
    """Size and checksum of a file, which is on the disk afterwards, whatever happens to the machine."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return {"bytes": os.fstat(file.fileno()).st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def check_sizes(folder: Path, manifest: Mapping[str, FileDigest]) -> None:
    """Raise CheckpointError for the first file that is missing or of another size; reads none."""
    for name, expected in manifest.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{folder} is damaged: {name} is missing.")
        if (num_bytes := path.stat().st_size) != expected["bytes"]:
            raise CheckpointError(f"{folder} is damaged: {name} has {num_bytes} bytes instead of {expected['bytes']}.")


def check_contents(folder: Path, manifest: Mapping[str, FileDigest], names: Iterable[str]) -> None:
    """Raise CheckpointError for the first of these files whose checksum is another."""
    for name in names:
        try:
            found = file_digest(folder / name)
        except OSError as error:
            raise CheckpointError(f"{folder} is damaged: {name} cannot be read: {error.strerror or error}.") from error
        if found["sha256"] != manifest[name]["sha256"]:
            raise CheckpointError(f"{folder} is damaged: the content of {name} is not what was written.")
