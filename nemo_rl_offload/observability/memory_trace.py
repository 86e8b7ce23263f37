"""Memory of a process over a step, sampled by a thread: what the report draws."""

import time
from collections.abc import Callable
from threading import Event, Thread

from nemo_rl_offload.runs.run_files import MemorySample

MAX_SAMPLES = 400
FIRST_INTERVAL_S = 0.002


class MemoryTrace:
    """Samples `read`, which gives used and offloaded bytes, until `finish`.

    A long step has as many samples as a short one: when there are `MAX_SAMPLES`, every second one is dropped and the
    interval doubled.
    """

    def __init__(self, read: Callable[[], tuple[int, int]]) -> None:
        self._read = read
        self._samples: list[MemorySample] = []
        self._ends = Event()
        self._thread = Thread(target=self._run, name="memory trace", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        start_s, interval_s = time.perf_counter(), FIRST_INTERVAL_S
        while True:
            used_bytes, offloaded_bytes = self._read()
            seconds = time.perf_counter() - start_s
            self._samples.append({"seconds": seconds, "used_bytes": used_bytes, "offloaded_bytes": offloaded_bytes})
            if len(self._samples) == MAX_SAMPLES:
                self._samples, interval_s = self._samples[::2], 2 * interval_s
            if self._ends.wait(interval_s):
                return

    def finish(self) -> list[MemorySample]:
        """Stop, and return the samples."""
        self._ends.set()
        self._thread.join()
        return self._samples
