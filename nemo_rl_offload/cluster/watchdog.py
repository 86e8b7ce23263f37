"""Ends what is left of a private Ray when its driver is gone; a script of its own that imports nothing else.

`python watchdog.py PID FOLDER` is started by the driver `PID`, whose Ray writes below `FOLDER`. The kernel ends Ray's
first processes with the driver; their agents hear of it after a minute, and a process that was just being started
never does. So this waits until the driver is gone, in whatever way, and then kills whoever has a file below the folder
open for writing, or was started with an option `--...=FOLDER/...`, until nobody has for `QUIET_S`.

Why a process: a thread dies with the driver. Why no mark in the environment: agents overwrite theirs with their title.
Why no pipe that ends with the driver: what the driver forks would hold it open.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

POLL_S = 0.2
QUIET_S = 3.0


def processes_of(folder: str) -> Iterator[int]:
    """Pids of other processes that belong to the Ray of this folder; reading its files is not enough."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):  # it has ended, or is another user's
                if f"={folder}/".encode() in (entry / "cmdline").read_bytes() or _writes_below(entry, folder):
                    yield int(entry.name)


def _writes_below(process: Path, folder: str) -> bool:
    for number in os.listdir(process / "fd"):
        with contextlib.suppress(OSError, StopIteration):  # closed meanwhile
            if not os.readlink(process / "fd" / number).startswith(f"{folder}/"):
                continue
            info = (process / "fdinfo" / number).read_text().splitlines()
            flags = next(line.split()[1] for line in info if line.startswith("flags:"))
            if int(flags, 8) & os.O_ACCMODE != os.O_RDONLY:
                return True
    return False


def main(driver: int, folder: str) -> None:
    """Wait for the driver's end, then for that of the others."""
    while os.getppid() == driver:
        time.sleep(POLL_S)
    last_s = time.monotonic()
    while time.monotonic() - last_s < QUIET_S:
        for pid in processes_of(folder):
            last_s = time.monotonic()
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_S)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
