"""A process without rights: it reads Python's own files and what it was handed, writes to what it was handed, no more.

Two of Linux' walls, neither of which needs root, a namespace or a package, so that they stand in a container too:

- Landlock (Linux 5.13) lets files be opened in the given folders alone. `/proc` is not among them: another process'
  variables and open files are out of reach, and so is its memory.
- seccomp lets the system calls of `_CALLS` through, a list of what Python needs for computing, some of them with
  certain arguments alone. What is not on it is refused by "Operation not permitted": sockets of any kind, processes,
  programs, signals to others, and every call that writes, renames, removes or locks a file or changes its rights.

Capabilities are dropped, so that root has no more than others, and limits can be lowered alone. Threads are allowed;
who starts such a process counts them.

Rejected: user namespaces, which Docker and Ubuntu refuse to most users; bubblewrap and libseccomp, which have to be
installed by root; a list of what is forbidden, since kernels get new calls. The limits: whether a path exists can be
seen; other hardware than x86-64 and arm64 is refused.
"""

import ctypes
import errno
import os
import platform
import resource
import struct
import sys
from collections.abc import Iterator, Sequence

_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""By `uname -m`: the column of `_CALLS`, and the kernel's number of it."""
_CALLS = """
read 0 63, write 1 64, readv 19 65, writev 20 66, pread64 17 67, close 3 57, lseek 8 62, fstat 5 80, newfstatat 262 79,
stat 4 -, lstat 6 -, statx 332 291, access 21 -, faccessat 269 48, faccessat2 439 439, readlink 89 -, readlinkat 267 78,
getdents64 217 61, getcwd 79 17, dup 32 23, dup2 33 -, dup3 292 24, pipe 22 -, pipe2 293 59, poll 7 -, ppoll 271 73,
select 23 -, pselect6 270 72, mmap 9 222, mprotect 10 226, munmap 11 215, mremap 25 216, madvise 28 233, brk 12 214,
rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139, rt_sigpending 127 136, rt_sigtimedwait 128 137,
sigaltstack 131 132, alarm 37 -, setitimer 38 103, getitimer 36 102, pause 34 -, restart_syscall 219 128, exit 60 93,
exit_group 231 94, futex 202 98, set_robust_list 273 99, rseq 334 293, sched_yield 24 124, sched_getaffinity 204 123,
getpid 39 172, gettid 186 178, getuid 102 174, geteuid 107 175, getgid 104 176, getegid 108 177, uname 63 160,
sysinfo 99 179, getrusage 98 165, times 100 153, getrlimit 97 163, getrandom 318 278, nanosleep 35 101,
clock_nanosleep 230 115, clock_gettime 228 113, clock_getres 229 114, gettimeofday 96 169, time 201 -
"""
_OPEN, _OPENAT, _FCNTL, _CLONE, _CLONE3 = (2, None), (257, 56), (72, 25), (56, 220), (435, 435)
_KILL, _TGKILL, _PRLIMIT64 = (62, 129), (234, 131), (302, 261)
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | 0o20000000  # the last is O_TMPFILE's own bit
_HARMLESS_FCNTL = (0, 1, 2, 3, 1030)
"""F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_DUPFD_CLOEXEC; F_SETOWN would send signals to others."""
_CLONE_THREAD = 0x10000

_LOAD, _AND, _EQUAL, _RETURN = 0x20, 0x54, 0x15, 0x06
_ALLOW, _KILL_PROCESS, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCHITECTURE = 0, 4

_LANDLOCK_CREATE_RULESET, _LANDLOCK_ADD_RULE, _LANDLOCK_RESTRICT_SELF = 444, 445, 446
_READ_FILE, _READ_FOLDER, _ALL_ACCESS = 1 << 2, 1 << 3, (1 << 13) - 1
_PR_GET_SECCOMP, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _FILTER = 21, 22, 38, 2

MAX_OPEN_FILES = 64


def missing() -> str | None:
    """Why `enter` would fail on this machine; None where it would not."""
    machine = platform.machine()
    if sys.platform != "linux" or machine not in _ARCHITECTURES:
        return (
            f"there is a sandbox for Linux on {' and '.join(_ARCHITECTURES)}, and this is {sys.platform} on {machine}"
        )
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(_LANDLOCK_CREATE_RULESET, None, 0, 1) < 1:
        return {
            errno.ENOSYS: f"the kernel ({platform.release()}) has no Landlock, which came with Linux 5.13",
            errno.EOPNOTSUPP: "the kernel has Landlock, and was started without it (lsm=landlock,...)",
        }.get(ctypes.get_errno(), f"Landlock is refused: {os.strerror(ctypes.get_errno())}")
    if libc.prctl(_PR_GET_SECCOMP, 0, 0, 0, 0) < 0:
        return f"the kernel ({platform.release()}) has no seccomp"
    return None


def limit(memory_bytes: int) -> None:
    """Limit this process' addresses, which are all the memory that it can have, and its open files; it writes none."""
    for which, most in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_NOFILE, MAX_OPEN_FILES),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        _, there = resource.getrlimit(which)
        most = most if there == resource.RLIM_INFINITY else min(most, there)
        resource.setrlimit(which, (most, most))


def enter(readable: Sequence[str]) -> None:
    """Give up all rights of this process, which has one thread, but to read what is below the given paths.

    Raises:
        OSError: the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    _check(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    _restrict_files(libc, readable)
    _check(libc.capset(struct.pack("Ii", 0x20080522, 0), bytes(24)))
    code = b"".join(struct.pack("HBBI", *line) for line in _filter(*_ARCHITECTURES[platform.machine()]))
    held = ctypes.create_string_buffer(code)
    program = struct.pack("H6xP", len(code) // 8, ctypes.addressof(held))
    _check(libc.prctl(_PR_SET_SECCOMP, _FILTER, program, 0, 0))


def _restrict_files(libc: ctypes.CDLL, readable: Sequence[str]) -> None:
    handled = struct.pack("Q", _ALL_ACCESS)
    ruleset = _check(libc.syscall(_LANDLOCK_CREATE_RULESET, handled, len(handled), 0))
    for path in filter(os.path.exists, readable):
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        access = _READ_FILE | (_READ_FOLDER if os.path.isdir(path) else 0)
        _check(libc.syscall(_LANDLOCK_ADD_RULE, ruleset, 1, struct.pack("=Qi", access, place), 0))
        os.close(place)
    _check(libc.syscall(_LANDLOCK_RESTRICT_SELF, ruleset, 0))
    os.close(ruleset)


def _filter(column: int, architecture: int) -> Iterator[tuple[int, int, int, int]]:
    """The instructions (code, steps when true, steps when false, value) that the kernel runs before each call."""
    yield _LOAD, 0, 0, _ARCHITECTURE
    yield _EQUAL, 1, 0, architecture
    yield _RETURN, 0, 0, _KILL_PROCESS
    yield _LOAD, 0, 0, _NUMBER
    for call in _CALLS.split(","):
        number = call.split()[1 + column]
        if number != "-":
            yield _EQUAL, 0, 1, int(number)
            yield _RETURN, 0, 0, _ALLOW
    own, zero = os.getpid(), 0
    yield from _with_argument(_OPEN[column], 1, _WRITES, [zero])
    yield from _with_argument(_OPENAT[column], 2, _WRITES, [zero])
    yield from _with_argument(_FCNTL[column], 1, 0xFFFFFFFF, _HARMLESS_FCNTL)
    yield from _with_argument(_CLONE[column], 0, _CLONE_THREAD, [_CLONE_THREAD])
    yield from _with_argument(_KILL[column], 0, 0xFFFFFFFF, [own])
    yield from _with_argument(_TGKILL[column], 0, 0xFFFFFFFF, [own])
    yield from _with_argument(_PRLIMIT64[column], 0, 0xFFFFFFFF, [zero])
    yield _EQUAL, 0, 1, _CLONE3[column]
    yield _RETURN, 0, 0, _ERROR | errno.ENOSYS  # its flags are in memory; the C library then takes clone
    yield _RETURN, 0, 0, _ERROR | errno.EPERM


def _with_argument(
    number: int | None, place: int, mask: int, allowed: Sequence[int]
) -> Iterator[tuple[int, int, int, int]]:
    """Let a call through where the lower half of an argument, masked, is one of some values."""
    if number is None:
        return
    yield _EQUAL, 0, 3 + 2 * len(allowed), number
    yield _LOAD, 0, 0, 16 + 8 * place
    yield _AND, 0, 0, mask
    for value in allowed:
        yield _EQUAL, 0, 1, value
        yield _RETURN, 0, 0, _ALLOW
    yield _RETURN, 0, 0, _ERROR | errno.EPERM


def _check(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
