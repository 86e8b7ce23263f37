"""The waits of a pipeline's first stage, on one GPU: sleeping kernels in the place of other stages.

In 1F1B over p stages, the first one runs p forwards and then waits until the first gradient has come back through the
others, p forwards and p-1 backwards after it began; behind the last forward, gradients come a forward and a backward
apart. A stage that was late waits less. How long a step had taken when it came to a wait is known a step later, so the
step before says how much is left: steps are alike here.
"""

from collections.abc import Callable
from typing import Any

import torch
from common import HAS_GPU

Event = Any


class PipelineWaits:
    """For a stage whose passes take these times without offloading, in ms. Does nothing on a CPU."""

    def __init__(self, num_stages: int, forward_ms: float, backward_ms: float) -> None:
        self.num_stages, self.forward_ms, self.backward_ms = num_stages, forward_ms, backward_ms
        self._cycles_per_ms = 0.0
        self._spans: list[tuple[Event, Event]] = []
        self._taken_ms: list[float] = []
        if HAS_GPU:
            num_cycles = 100_000_000
            self._cycles_per_ms = num_cycles / _milliseconds(lambda: torch.cuda._sleep(num_cycles))

    def begin(self) -> Event:
        """A step begins; returns this moment."""
        if HAS_GPU:
            torch.cuda.synchronize()
        self._taken_ms = [start.elapsed_time(end) for start, end in self._spans]
        self._spans = []
        return mark()

    def for_first_gradient(self, begun: Event) -> None:
        """Behind the forwards ahead of a step that began then."""
        others_ms = (self.num_stages - 1) * self.backward_ms
        self._until(begun, others_ms + self.num_stages * self.forward_ms, others_ms)

    def for_next_gradient(self, begun: Event) -> None:
        """Behind a backward that began then, when no forward is left."""
        self._until(begun, self.forward_ms + self.backward_ms, self.forward_ms)

    def _until(self, begun: Event, ms: float, usual_ms: float) -> None:
        if not HAS_GPU:
            return
        number = len(self._spans)
        self._spans.append((begun, mark()))
        left_ms = ms - self._taken_ms[number] if number < len(self._taken_ms) else usual_ms
        if left_ms > 0:
            torch.cuda._sleep(int(left_ms * self._cycles_per_ms))


def mark() -> Event:
    """This moment of the device; None on a CPU."""
    if not HAS_GPU:
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _milliseconds(work: Callable[[], object]) -> float:
    work()
    start = mark()
    work()
    end = mark()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end))
