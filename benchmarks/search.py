"""The largest number that fits, where trying one is dear: memory grows about linearly with it. Pure Python."""

from collections.abc import Mapping

RESOLUTION = 1.03
"""The smallest that does not fit is at most this times the largest that fits."""


def next_candidates(known: Mapping[int, int | None], limit_bytes: int, start: int, step: int) -> list[int]:
    """What to try next, smallest first, until one does not fit; multiples of `step`. Empty: done.

    `known` has the peak bytes of each that was tried, None where it did not fit; `limit_bytes` is the device's memory.
    """
    fitting = {number: peak for number, peak in known.items() if peak is not None}
    failing = [number for number, peak in known.items() if peak is None]
    if not fitting:
        smallest = min(failing, default=None)
        if smallest is None:
            return [start, 2 * start]
        return [smallest // 2 // step * step] if smallest >= 2 * step else []
    low = max(fitting)
    if failing:
        high = min(failing)
        if high - low <= step or high <= RESOLUTION * low:
            return []
        guess = _rounded(_where_full(fitting, limit_bytes) or 0, step)
        return [guess if low < guess < high else _rounded((low + high) / 2, step)]
    full = _where_full(fitting, limit_bytes)
    if full is None or full <= low:
        full = low * 1.1
    candidates = sorted({_rounded(full * share, step) for share in (0.85, 0.95, 1.0, 1.05, 1.12)})
    return [number for number in candidates if number > low] or [low + step]


def _rounded(number: float, step: int) -> int:
    return round(number / step) * step


def _where_full(fitting: Mapping[int, int], limit_bytes: int) -> float | None:
    """By a line through the two largest that fit; None where that says nothing."""
    if len(fitting) < 2:
        return None
    first, second = sorted(fitting)[-2:]
    slope = (fitting[second] - fitting[first]) / (second - first)
    return second + (limit_bytes - fitting[second]) / slope if slope > 0 else None


def longest(known: Mapping[int, int | None]) -> int | None:
    """The largest that fits."""
    return max((number for number, peak in known.items() if peak is not None), default=None)
