"""What a start takes, part by part."""

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

WORTH_SAYING_S = 1.0


class StartClock:
    """Seconds of each part of a start, in the order in which they began."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count what happens inside."""
        start_s = time.perf_counter()
        self.seconds.setdefault(name, 0.0)
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start_s


def slowest(ranks: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Of each part, the seconds of the rank that took longest."""
    found: dict[str, float] = {}
    for seconds in ranks:
        for name, value in seconds.items():
            found[name] = max(value, found.get(name, 0.0))
    return found


def told(seconds: Mapping[str, float]) -> str:
    """`imports 8.1 s, weights 2.0 s.`: the parts that took a second or more; empty without any."""
    parts = [f"{name} {value:.1f} s" for name, value in seconds.items() if value >= WORTH_SAYING_S]
    return f"{', '.join(parts)}." if parts else ""
