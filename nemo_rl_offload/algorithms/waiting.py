"""Long waits, said with the time that they take."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from nemo_rl_offload.units import human_duration

EVERY_S = 30.0
"""Between lines that say that something still goes on."""
WORTH_SAYING_S = 1.0


@contextmanager
def waiting(
    say: Callable[[str], object], what: str, *, begins: bool = True, worth_saying_s: float = WORTH_SAYING_S
) -> Iterator[None]:
    """Say what is waited for, now and then for how long already, and at its end how long it was.

    Args:
        begins: say it at the beginning.
        worth_saying_s: a shorter wait ends without a word, and so does one that fails.
    """
    if begins:
        say(what)
    has_ended, start_s = threading.Event(), time.perf_counter()

    def tell() -> None:
        while not has_ended.wait(EVERY_S):
            say(f"{what}: {human_duration(time.perf_counter() - start_s)} so far")

    thread = threading.Thread(target=tell, name="waiting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()
    if (seconds := time.perf_counter() - start_s) >= worth_saying_s:
        say(f"{what}: done in {human_duration(seconds)}.")


def start_of_ray() -> str:
    """What is said while Ray starts, or a cluster is joined."""
    address = os.environ.get("RAY_ADDRESS")
    return f"Joining the Ray cluster at RAY_ADDRESS={address}" if address else "Starting Ray"
