"""The highest device memory of each phase of a worker, and what a phase may take without a new highest."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Counter(NamedTuple):
    """A device's allocator: bytes now, the most since the last reset, that reset, and the most that it took from the
    device since then."""

    allocated: Callable[[], int]
    peak: Callable[[], int]
    reset: Callable[[], None]
    reserved: Callable[[], int]


def cuda_counter() -> Counter | None:
    """torch's allocator on the current GPU; None without one."""
    import torch

    if not torch.cuda.is_available():
        return None
    return Counter(
        torch.cuda.memory_allocated,
        torch.cuda.max_memory_allocated,
        torch.cuda.reset_peak_memory_stats,
        torch.cuda.max_memory_reserved,
    )


class DevicePeaks(NamedTuple):
    """The highest of a device, in bytes."""

    by_phase: dict[str, int]
    """Of tensors; empty without a device."""
    reserved: int | None
    """What the allocator took from the device, with what lies unused between tensors."""


class PhasePeaks:
    """Peaks by phase since the worker began. Without a `counter` there are none.

    The engine's `auto` resets the same counter when a training step begins to save; what a phase took before that is
    less than what it takes after.
    """

    def __init__(self, counter: Counter | None) -> None:
        self._counter = counter
        self._phase = "loading"
        self._peaks: dict[str, int] = {}
        self._grown: dict[str, int] = {}
        self._reserved: int | None = None

    @property
    def peaks(self) -> DevicePeaks:
        """Until now."""
        self._note()
        return DevicePeaks(dict(self._peaks), self._reserved)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What is allocated within belongs to this phase; then again to the one around it, or to none."""
        around, start_bytes = self._phase, self._allocated()
        self._enter(name)
        try:
            yield
        finally:
            if self._counter is not None:
                self._grown[name] = self._counter.peak() - start_bytes
            self._enter("between phases" if around == "loading" else around)

    def room_bytes(self, *, within: str, beside: str) -> int:
        """What can be allocated now, and held while a phase like the last of `beside` runs, without a new highest of
        the phase `within`; 0 before either was."""
        if self._counter is None or within not in self._peaks or beside not in self._grown:
            return 0
        return max(0, self._peaks[within] - self._allocated() - self._grown[beside])

    def _allocated(self) -> int:
        return 0 if self._counter is None else self._counter.allocated()

    def _note(self) -> None:
        if self._counter is not None:
            self._peaks[self._phase] = max(self._counter.peak(), self._peaks.get(self._phase, 0))
            self._reserved = max(self._counter.reserved(), self._reserved or 0)

    def _enter(self, name: str) -> None:
        self._note()
        self._phase = name
        if self._counter is not None:
            self._counter.reset()
