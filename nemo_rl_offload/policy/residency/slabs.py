"""Where an optimizer's tensors lie in host memory, and in which buckets they pass through the device. No torch.

What is kept for a parameter (its float32 main weights, Adam's two averages) has its length each time. So a slab is a
range of elements, backed once for every kind of tensor: a parameter has the same place in each, in one piece, of which
tensors can be views; and a bucket is a part of such a range, one large copy a kind, wherever parameters begin and end.
Slabs are filled first fit up to a power of two, since allocators of pinned memory round up to one: only the last is not
full. A parameter that is larger than a bucket passes in several, since what optimizers do is done element by element.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

ALIGNMENT = 256
"""Elements. Every tensor's beginning is aligned then for copies and vectorized kernels, of two bytes an element too."""
LEAST_SLAB = 1 << 26


class Place(NamedTuple):
    """Of a parameter: a slab, and the element of it with which it begins."""

    slab: int
    start: int


class Segment(NamedTuple):
    """`num` elements of a parameter, from `start` on, which are a bucket's from `offset` on."""

    parameter: int
    start: int
    offset: int
    num: int


class Bucket(NamedTuple):
    """Elements `start` to `end` of a slab, and whose they are."""

    slab: int
    start: int
    end: int
    segments: tuple[Segment, ...]


def pack(lengths: Sequence[int], least_slab: int = LEAST_SLAB) -> tuple[list[Place], list[int]]:
    """Places for parameters of so many elements, and the elements of each slab."""
    sizes = [-(-length // ALIGNMENT) * ALIGNMENT for length in lengths]
    capacity = max(least_slab, 1 << (max(sizes, default=1) - 1).bit_length())
    places: list[Place] = []
    slabs: list[int] = []
    for size in sizes:
        slab = next((number for number, end in enumerate(slabs) if end + size <= capacity), len(slabs))
        if slab == len(slabs):
            slabs.append(0)
        places.append(Place(slab, slabs[slab]))
        slabs[slab] += size
    return places, slabs


def cut(places: Sequence[Place], lengths: Sequence[int], slabs: Sequence[int], bucket: int) -> Iterator[Bucket]:
    """Buckets of at most `bucket` elements, or as few as the alignment allows, slab by slab."""
    bucket = max(bucket // ALIGNMENT, 1) * ALIGNMENT
    members: list[list[int]] = [[] for _ in slabs]
    for number, place in enumerate(places):
        members[place.slab].append(number)
    for slab, end in enumerate(slabs):
        waiting = deque(members[slab])
        for first in range(0, end, bucket):
            last = min(first + bucket, end)
            segments = []
            while waiting and places[waiting[0]].start < last:
                begin, length = places[waiting[0]].start, lengths[waiting[0]]
                start, stop = max(first, begin), min(last, begin + length)
                if start < stop:  # else what is left of it is padding
                    segments.append(Segment(waiting[0], start - begin, start - first, stop - start))
                if begin + length > last:
                    break
                waiting.popleft()
            yield Bucket(slab, first, last, tuple(segments))


def choose(sizes: Sequence[int], share: float) -> list[int]:
    """Which of things of so many bytes go, in their order: the largest that fit into that share of all, so that what it
    is short of is less than the smallest that stays."""
    room, chosen = round(share * sum(sizes)), []
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        if sizes[number] <= room:
            room -= sizes[number]
            chosen.append(number)
    return sorted(chosen)
