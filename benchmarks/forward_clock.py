"""How long forwards take on the device, and how long the host works for them. Where both are alike, the host is the
bound, and whatever else it does in a forward makes the step longer.

The host's time is without its waits for events, as for routing results. Limit: a call that waits in the driver (a full
queue of launches, memory to be pinned) counts as work.
"""

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from common import HAS_GPU, Sample


class ForwardClock:
    """Times of the forwards since they were last taken."""

    def __init__(self) -> None:
        self._host_ms: list[float] = []
        self._on_device: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._waited_s = 0.0

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Time what is inside."""
        synchronize = torch.cuda.Event.synchronize

        def timed_synchronize(event: torch.cuda.Event) -> None:
            began = time.perf_counter()
            synchronize(event)
            self._waited_s += time.perf_counter() - began

        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if HAS_GPU else []  # type: ignore[no-untyped-call]
        for event in events[:1]:
            event.record()
        self._waited_s, began = 0.0, time.perf_counter()
        torch.cuda.Event.synchronize = timed_synchronize  # type: ignore[method-assign]
        try:
            yield
        finally:
            torch.cuda.Event.synchronize = synchronize  # type: ignore[method-assign]
        self._host_ms.append((time.perf_counter() - began - self._waited_s) * 1e3)
        for event in events[1:]:
            event.record()
            self._on_device.append((events[0], event))

    def take(self) -> Sample:
        """Medians in ms: `forward_host_ms`, and on a device `forward_ms`. The device has to have passed all."""
        found = {"forward_host_ms": statistics.median(self._host_ms)} if self._host_ms else {}
        if self._on_device:
            found["forward_ms"] = statistics.median([start.elapsed_time(end) for start, end in self._on_device])
        self._host_ms, self._on_device = [], []
        return found
