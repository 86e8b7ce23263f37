"""Opens a file, or a folder, and nothing else that may stand at its name.

There may be a link, a pipe that is waited for, or a device that does something when it is opened. So what is there is
looked at before it is opened, which is done without following a link and without waiting; and again afterwards, for it
can be exchanged in between.

Who asks says what a refusal means: `documents` for what users hand over, where links are theirs to set,
`runs.plain_files` for what a run writes, `runs.manifest` for what a checkpoint holds.
"""

import errno
import os
import stat
from pathlib import Path

_SAFELY = os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
_KINDS = {
    stat.S_IFLNK: "a link",
    stat.S_IFIFO: "a pipe",
    stat.S_IFDIR: "a folder",
    stat.S_IFREG: "a file",
    stat.S_IFSOCK: "a socket",
}


class NotPlainError(OSError):
    """What stands at a name is no plain file, or no folder; `what` and `strerror` say what it is."""

    def __init__(self, path: Path | str, what: str) -> None:
        super().__init__(errno.EINVAL, what, str(path))
        self.what = what


def fault_of(found: os.stat_result, *, wants_folder: bool = False, may_have_other_names: bool = True) -> str | None:
    """Why what was found is not what is wanted, a plain file or a folder; None where it is."""
    kind, wanted = stat.S_IFMT(found.st_mode), stat.S_IFDIR if wants_folder else stat.S_IFREG
    if kind != wanted:
        return f"it is {_KINDS.get(kind, 'a device')}, and no {'folder' if wants_folder else 'plain file'}"
    if not wants_folder and found.st_nlink > 1 and not may_have_other_names:
        return "it is a hard link, through which another file would be written"
    return None


def open_plain_file(
    path: Path | str,
    flags: int = os.O_RDONLY,
    *,
    folder: int | None = None,
    wants_folder: bool = False,
    follows_links: bool = False,
    may_have_other_names: bool = True,
) -> int:
    """Return a descriptor of the file, or the folder, at a path.

    Args:
        path: where it is; relative to ``folder`` where that is given, a descriptor.
        flags: as for `os.open`.
        folder: of which `path` is a part.
        wants_folder: it has to be a folder.
        follows_links: a link at the path's end is followed.
        may_have_other_names: whether a second name of a file will do.

    Raises:
        NotPlainError: it is something else.
        OSError: it cannot be opened.
    """
    options = {"wants_folder": wants_folder, "may_have_other_names": may_have_other_names}
    try:
        fault = fault_of(os.stat(path, dir_fd=folder, follow_symlinks=follows_links), **options)
    except FileNotFoundError:
        if not flags & os.O_CREAT:
            raise
        fault = None
    if fault:
        raise NotPlainError(path, fault)
    flags |= _SAFELY if follows_links else _SAFELY | os.O_NOFOLLOW
    descriptor = os.open(path, flags, 0o666, dir_fd=folder)
    if fault := fault_of(os.fstat(descriptor), **options):
        os.close(descriptor)
        raise NotPlainError(path, fault)
    return descriptor
