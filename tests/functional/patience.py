"""How long tests wait for what should happen: until a hang is certain, however busy the machine is."""

import time
from collections.abc import Callable

import psutil

PATIENCE_S = 600.0


def eventually(condition: Callable[[], object], *, period_s: float = 0.05) -> bool:
    """Whether `condition` holds at last; looks every `period_s`, for `PATIENCE_S`."""
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > end_s:
            return False
        time.sleep(period_s)
    return True


def is_running(pid: int) -> bool:
    """Whether the process is there, and no zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
