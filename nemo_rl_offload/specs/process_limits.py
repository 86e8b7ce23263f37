"""Limits of a process that a run needs to be wide: open files, and addresses.

Ray and gloo open a file for each connection, and libraries reserve gigabytes of addresses that they never use. Where a
limit stops them, they end by a C++ exception, or tell an error number; neither says what to do. So the limits are
looked at before anything is started.
"""

import contextlib
import errno
import resource
from collections.abc import Iterator
from pathlib import Path

from nemo_rl_offload.errors import ResourceError
from nemo_rl_offload.units import GIB, human_bytes

LEAST_OPEN_FILES = 1024
LEAST_ADDRESSES_BYTES = 8 * GIB
_UNLIMITED = resource.RLIM_INFINITY
_FILES_FIX = f"Raise it: ulimit -n {LEAST_OPEN_FILES} or more, docker run --ulimit nofile=65536, or limits.conf nofile"
_ADDRESSES_FIX = "Raise it: ulimit -v unlimited, or limits.conf as. Host memory is limited by a cgroup, and not so"


def open_files() -> tuple[str, str]:
    """How many files a process may have open, and the fix where these are too few for a run."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    shown = "unlimited" if soft == _UNLIMITED else str(soft)
    is_enough = soft == _UNLIMITED or soft >= LEAST_OPEN_FILES
    return shown, "" if is_enough else _FILES_FIX


def addresses() -> tuple[str, str]:
    """How much address space a process may have, and the fix where that is too little for a run."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    shown = "unlimited" if soft == _UNLIMITED else human_bytes(soft)
    is_enough = soft == _UNLIMITED or soft >= LEAST_ADDRESSES_BYTES
    return shown, "" if is_enough else _ADDRESSES_FIX


def widen_limits() -> None:
    """Make the limits wide enough for a run, as far as they may be raised. Raises ResourceError: they may not."""
    for which, least in ((resource.RLIMIT_NOFILE, LEAST_OPEN_FILES), (resource.RLIMIT_AS, LEAST_ADDRESSES_BYTES)):
        soft, hard = resource.getrlimit(which)
        if soft != _UNLIMITED and soft < least and (hard == _UNLIMITED or hard >= least):
            resource.setrlimit(which, (least, hard))
    problems = [
        f"{what}: a process may have {shown}, and a run needs {least} at least (its own, and Ray's). {fix}."
        for what, (shown, fix), least in (
            ("open files (ulimit -n)", open_files(), str(LEAST_OPEN_FILES)),
            ("address space (ulimit -v)", addresses(), human_bytes(LEAST_ADDRESSES_BYTES)),
        )
        if fix
    ]
    if problems:
        raise ResourceError("\n".join(problems))


def allow_open_files(count: int) -> None:
    """Let this process open so many files, or as many as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != _UNLIMITED and soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count if hard == _UNLIMITED else min(count, hard), hard))


@contextlib.contextmanager
def memory_at_most(num_bytes: int) -> Iterator[None]:
    """Let this process take so much more memory within the block, beyond which MemoryError is raised.

    What is mapped from files is not counted. Other threads meet the limit too.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    used_pages = int(Path("/proc/self/statm").read_text().split()[5])
    limit = used_pages * resource.getpagesize() + num_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit if soft == _UNLIMITED else min(limit, soft), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def explained(error: BaseException) -> str | None:
    """What ran out where a limit of the process was met, and how to raise it; None for another error."""
    if isinstance(error, MemoryError):
        shown, fix = addresses()
        limit = "" if shown == "unlimited" else f" Its address space is limited to {shown} (ulimit -v)."
        return f"the process can get no more memory.{limit} {fix or 'Free some memory, or take a machine with more'}."
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return f"no more files can be opened: a process may have {open_files()[0]} (ulimit -n). {_FILES_FIX}."
    return None
