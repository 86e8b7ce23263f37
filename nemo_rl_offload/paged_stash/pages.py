"""The stash's bookkeeping in plain Python: what the kernels must do, said without a device.

Pages of two tiers, device and host, lie in a ring freelist each. `head` and `tail` only grow: the free pages of a tier
are the ring's entries from `head` to `tail`, modulo the tier's number of pages. Pages are taken at the head and
returned at the tail, in the order of the record that holds them.
"""

import math
from collections import Counter
from dataclasses import dataclass

MARGIN = 1.05
"""What is recommended over the most that was needed."""


def num_pages(num_rows: int, page_size: int) -> int:
    """Pages that hold this many rows."""
    return -(-num_rows // page_size)


@dataclass
class Tier:
    """One ring freelist over the pages `first .. first + size - 1`."""

    first: int
    size: int

    def __post_init__(self) -> None:
        self.ring = list(range(self.first, self.first + self.size))
        self.head, self.tail = 0, self.size

    @property
    def num_free(self) -> int:
        return self.tail - self.head

    def take(self, number: int) -> list[int]:
        """The next `number` free pages; there must be as many."""
        assert number <= self.num_free
        taken = [self.ring[position % self.size] for position in range(self.head, self.head + number)]
        self.head += number
        return taken

    def put(self, pages: list[int]) -> None:
        """Return pages."""
        for page in pages:
            self.ring[self.tail % self.size] = page
            self.tail += 1

    def free(self) -> list[int]:
        """Free pages, first to be taken first."""
        return [self.ring[position % self.size] for position in range(self.head, self.tail)]


class Pages:
    """Who holds which page: `num_device` pages on the device, and after them `num_host` pinned ones on the host."""

    def __init__(self, page_size: int, num_device: int, num_host: int) -> None:
        self.page_size = page_size
        self.device, self.host = Tier(0, num_device), Tier(num_device, num_host)
        self.overflowed = False
        self.num_spilled = 0
        self.peak = 0
        """Most pages in use or asked for at a time."""

    @property
    def num_used(self) -> int:
        return self.device.size - self.device.num_free + self.host.size - self.host.num_free

    def stash(self, num_rows: int) -> list[int]:
        """Take pages for a tensor's live rows: of the device while it has any, then of the host.

        Where they do not suffice, none are taken, and `overflowed` is set.
        """
        wanted = num_pages(num_rows, self.page_size)
        self.peak = max(self.peak, self.num_used + wanted)
        num_device = min(wanted, self.device.num_free)
        num_host = wanted - num_device
        if num_host > self.host.num_free:
            self.overflowed = True
            return []
        self.num_spilled += num_host
        return self.device.take(num_device) + self.host.take(num_host)

    def restore(self, record: list[int]) -> None:
        """Return the pages that `stash` gave."""
        self.device.put([page for page in record if page < self.device.size])
        self.host.put([page for page in record if page >= self.device.size])

    def check(self, records: list[list[int]]) -> None:
        """Every page is either free or in exactly one of the live `records`, and free in its own tier."""
        for tier in (self.device, self.host):
            assert 0 <= tier.num_free <= tier.size
            assert all(tier.first <= page < tier.first + tier.size for page in tier.free())
        held = Counter(page for record in records for page in record)
        held.update(self.device.free() + self.host.free())
        assert held == Counter(range(self.device.size + self.host.size)), "a page is lost, or held twice"


def recommended_factor(needed: float) -> float:
    """A factor with a margin over what was needed, rounded up to twentieths."""
    return math.ceil(round(needed * MARGIN * 20, 6)) / 20
