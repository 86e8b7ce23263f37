"""Random work on the stash's kernels, against the page bookkeeping in plain Python.

    python tests/unit/paged_stash/stash_cases.py --cases 5000

A case has a pool of random page size, row width (any number of bytes) and tiers, and the passes of a pipeline stage in
Megatron's order: one after another, 1F1B or interleaved, several microbatches in flight, or any order. A forward
stashes a few tensors (no row, all rows, as many as fit exactly, one page too many), a backward restores them or, for a
graph that was dropped, only returns their pages. After each operation the record, the freelist and the counters must be
those of the reference, every page be free or held once, live rows be back and dead rows be untouched. Some pools lie
behind more than 2^31 words of unused address space.
"""

import argparse
import random
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_rl_offload.paged_stash.kernels import RECORD_HEADER, Pool
from nemo_rl_offload.paged_stash.pages import Pages, num_pages
from nemo_rl_offload.planner.simulate.pipeline_schedule import PipelinePass, pipeline_schedule

FAR_WORDS = 2**31
SENTINEL = 0xA5


@dataclass(eq=False)
class Held:
    """One stashed tensor."""

    source: Tensor
    num_rows: int
    record: Tensor
    expected: list[int]


class Case:
    """A pool and its reference; every operation is done by both and compared."""

    def __init__(self, rng: random.Random, seen: Counter[str]) -> None:
        self.rng, self.seen = rng, seen
        self.generator = torch.Generator().manual_seed(rng.getrandbits(32))
        self.page_size, self.row_bytes = rng.randint(1, 5), rng.choice((1, 2, 3, 4, 6, 7, 8, 12, 16, 26, 40))
        device, host = rng.randint(0, 12), rng.choice((0, 0, 0, rng.randint(1, 6)))
        self.pool = Pool(self.row_bytes, self.page_size, device, host, torch.device("cpu"))
        self.pool.num_programs = rng.choice((1, 1, 2, 3))
        self.pages = Pages(self.page_size, device, host)
        self.held: list[Held] = []
        self.first_page = 0
        if self.row_bytes % 2 and rng.random() < 0.1:
            seen["far away"] += 1
            self.move_far_away()

    def move_far_away(self) -> None:
        """Give the pool as much address space as 2^31 words take before its first page."""
        page_bytes = self.page_size * self.row_bytes
        self.first_page = -(-FAR_WORDS // page_bytes)
        self.pool.device_pages = torch.empty((self.first_page + self.pool.num_device) * page_bytes, dtype=torch.uint8)
        self.pool.ring[: self.pool.num_device] += self.first_page

    def num_rows(self) -> int:
        """Rows of the next tensor: often a count at which something changes."""
        free = self.pages.device.num_free + self.pages.host.num_free
        device = self.pages.device.num_free
        kind = self.rng.choice(("any", "any", "any", "none", "one", "device full", "full", "one page over"))
        self.seen[kind] += 1
        rows = {
            "any": self.rng.randint(0, 2 * self.page_size + 1),
            "none": 0,
            "one": 1,
            "device full": device * self.page_size,
            "full": free * self.page_size - self.rng.randrange(self.page_size),
            "one page over": free * self.page_size + 1,
        }
        return max(0, rows[kind])

    def stash(self) -> Held:
        rows = self.num_rows()
        capacity = rows if self.rng.random() < 0.3 else rows + self.rng.randint(0, 2 * self.page_size)
        source = torch.randint(0, 256, (capacity * self.row_bytes,), dtype=torch.uint8, generator=self.generator)
        record = self.pool.new_record(capacity)
        dtype = self.rng.choice((torch.int32, torch.int64))
        self.pool.stash(source, torch.tensor([rows], dtype=dtype), record)
        held = Held(source, rows, record, self.pages.stash(rows))
        self.held.append(held)
        self.seen["overflow"] += len(held.expected) < num_pages(rows, self.page_size)
        self.seen["spill"] += any(page >= self.pool.num_device for page in held.expected)
        self.seen["all rows live"] += capacity == rows > 0
        self.check()
        on_device, on_host = record[:2].tolist()
        ids = record[RECORD_HEADER : RECORD_HEADER + on_device + on_host]
        ids[:on_device] -= self.first_page
        assert ids.tolist() == held.expected, "other pages"
        ids[:on_device] += self.first_page
        assert on_device == sum(page < self.pool.num_device for page in held.expected)
        return held

    def restore(self, held: Held) -> None:
        self.held.remove(held)
        self.pages.restore(held.expected)
        if self.rng.random() < 0.1:
            self.seen["release"] += 1
            self.pool.release(held.record)
        else:
            target = torch.full_like(held.source, SENTINEL)
            self.pool.restore(target, held.record)
            live = held.num_rows * self.row_bytes if held.expected else 0
            assert torch.equal(target[:live], held.source[:live]), "live rows differ"
            assert bool((target[live:] == SENTINEL).all()), "dead rows were written"
        self.check()

    def check(self) -> None:
        """The pool's freelist and counters are the reference's, and no page is lost or held twice."""
        pages, counters = self.pages, self.pool.counters()
        pages.check([held.expected for held in self.held])
        size = self.pool.num_device
        device_ring = self.pool.ring[:size] - self.first_page
        tiers = (("device", pages.device, device_ring), ("host", pages.host, self.pool.ring[size:]))
        for name, tier, ring in tiers:
            assert (counters[f"head_{name}"], counters[f"tail_{name}"]) == (tier.head, tier.tail), "other head or tail"
            assert ring.tolist() == tier.ring, "another freelist"
        assert counters["done"] == 0
        assert (counters["overflowed"], counters["spilled"]) == (int(pages.overflowed), pages.num_spilled)
        assert counters["peak"] == pages.peak


def passes(rng: random.Random, seen: Counter[str]) -> list[PipelinePass]:
    """The passes of one pipeline stage in one step."""
    kind = rng.choice(("in turn", "1F1B", "interleaved", "any"))
    seen[kind] += 1
    num_stages, num_chunks = 2, 2 if kind == "interleaved" else 1
    number = 2 if kind == "interleaved" else rng.randint(1, 3)
    if kind != "any":
        stage = rng.randrange(num_stages) if kind != "in turn" else num_stages - 1
        return list(pipeline_schedule(num_stages, number, num_chunks)[stage])
    order = [(rng.random(), microbatch) for microbatch in range(number) for _ in range(2)]
    seen_before: set[int] = set()
    result = []
    for _, microbatch in sorted(order):
        result.append(PipelinePass(microbatch not in seen_before, 0, microbatch))
        seen_before.add(microbatch)
    return result


def run_case(seed: int, seen: Counter[str] | None = None) -> None:
    """One case; AssertionError says what was wrong."""
    rng, seen = random.Random(seed), Counter() if seen is None else seen
    case = Case(rng, seen)
    for _ in range(rng.choice((1, 1, 1, 2))):  # steps, the second with the first one's freelist
        waiting: dict[tuple[int, int], list[Held]] = {}
        for each in passes(rng, seen):
            key = (each.chunk, each.microbatch)
            if each.forward:
                waiting[key] = [case.stash() for _ in range(rng.choice((1, 1, 1, 2)))]
            else:
                for held in reversed(waiting.pop(key)):
                    case.restore(held)
        assert not case.held
        assert case.pages.num_used == 0


def run_cases(seeds: Iterable[int]) -> tuple[list[str], Counter[str]]:
    """What went wrong, by seed, and how often each situation came up."""
    seen: Counter[str] = Counter()
    wrong = []
    for seed in seeds:
        try:
            run_case(seed, seen)
        except AssertionError as error:
            wrong.append(f"case {seed}: {error}")
    return wrong, seen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=5000)
    parser.add_argument("--first", type=int, default=0, metavar="SEED")
    options = parser.parse_args()
    wrong, seen = run_cases(range(options.first, options.first + options.cases))
    print("\n".join(wrong[:20]))
    print(f"{options.cases} cases, {len(wrong)} mismatches")
    print("seen:", ", ".join(f"{name} {number}" for name, number in sorted(seen.items())))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
