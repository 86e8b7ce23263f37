"""Bin packing: items of different sizes into few bins of one capacity, by NeMo-RL's names of the heuristics.

Finding the fewest bins is NP-hard. First-fit decreasing needs at most 11/9 of the fewest and a few, modified first-fit
decreasing 71/60 (Johnson and Garey, 1985, https://doi.org/10.1016/0885-064X(85)90022-6). NeMo-RL's
`first_fit_shuffle` is left out: it is random, and worse.
"""

from collections.abc import Callable, Collection, Sequence

Bins = list[list[int]]
"""Numbers of the items in each bin."""


def concatenative(sizes: Sequence[int], capacity: int) -> Bins:
    """Items in their order; a bin is closed when the next does not fit."""
    bins: Bins = []
    room = 0
    for number, size in enumerate(sizes):
        if size > room:
            bins.append([])
            room = capacity
        bins[-1].append(number)
        room -= size
    return bins


def first_fit_decreasing(sizes: Sequence[int], capacity: int) -> Bins:
    """Items from the largest on, each into the first bin where it fits."""
    return _first_fit(_decreasing(sizes), sizes, capacity)


def modified_first_fit_decreasing(sizes: Sequence[int], capacity: int) -> Bins:
    """First-fit decreasing, after the bins of items above half the capacity were filled by rules of their own.

    Those bins get, where they fit: one item above a third; then, from the bin with the most room on, the smallest item
    above a sixth and the largest that fits beside it; then whatever is largest and fits.
    """
    order = _decreasing(sizes)
    halves, thirds, sixths = ({n for n in order if parts * sizes[n] > capacity} for parts in (2, 3, 6))
    bins = [[number] for number in order if number in halves]
    rest = order[len(bins) :]
    rooms = [capacity - sizes[pack[0]] for pack in bins]

    def put_largest(index: int, candidates: Collection[int]) -> bool:
        number = next((n for n in rest if n in candidates and sizes[n] <= rooms[index]), None)
        if number is not None:
            put(index, number)
        return number is not None

    def put(index: int, number: int) -> None:
        bins[index].append(number)
        rooms[index] -= sizes[number]
        rest.remove(number)

    for index in range(len(bins)):
        put_largest(index, thirds)
    for index in reversed(range(len(bins))):
        small = [number for number in rest if number in sixths - thirds]
        if len(bins[index]) == 1 and len(small) > 1 and sizes[small[-1]] + sizes[small[-2]] <= rooms[index]:
            put(index, small[-1])
            put_largest(index, small[:-1])
    for index in range(len(bins)):
        while put_largest(index, rest):
            pass
    return bins + _first_fit(rest, sizes, capacity)


def _decreasing(sizes: Sequence[int]) -> list[int]:
    return sorted(range(len(sizes)), key=lambda number: -sizes[number])


def _first_fit(order: Sequence[int], sizes: Sequence[int], capacity: int) -> Bins:
    bins: Bins = []
    rooms: list[int] = []
    for number in order:
        index = next((i for i, room in enumerate(rooms) if sizes[number] <= room), len(bins))
        if index == len(bins):
            bins.append([])
            rooms.append(capacity)
        bins[index].append(number)
        rooms[index] -= sizes[number]
    return bins


BINS: dict[str, Callable[[Sequence[int], int], Bins]] = {
    "concatenative": concatenative,
    "first_fit_decreasing": first_fit_decreasing,
    "modified_first_fit_decreasing": modified_first_fit_decreasing,
}
