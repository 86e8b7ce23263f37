"""Which samples share a microbatch, and which rank computes it, when a microbatch is a number of tokens.

Two ways to keep to such a budget. Dynamic batching pads: samples are sorted by length, so that those of one microbatch
are about equally long, and a microbatch has as many rows as fit at the length of its longest. Packing does not pad:
the rows of a microbatch are written one after another into one row, and samples are chosen so that it gets full.

The plan is made for all ranks at once, from lengths alone, before anything is sent. So every rank gets the same number
of microbatches, which ranks that hold each other's experts need, and a multiple of the pipeline's ranks where those
take turns; and the n-th microbatches of all ranks cost about the same, the costliest first. The alternative, each rank
cutting its own contiguous share, leaves some ranks waiting and needs a message to agree on a number. Where the number
does not come out, microbatches are halved; only where there are too few samples are there empty ones, without weight.

Where all microbatches of a step must have one shape (`one_shape`; see `megatron.step.microbatches`), dynamic batching
fills up to equal numbers of rows at the longest length, and packing fills the shorter packs up.

A sample is one row, or several that must stay together (a preference pair). Nothing here knows tensors.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from nemo_rl_offload.batching.bins import BINS
from nemo_rl_offload.specs.parallel_layout import LengthRound, rounded_length

Lengths = Sequence[int]
"""Lengths of the rows of a sample."""


@dataclass(frozen=True)
class TokenBudget:
    """How large a microbatch may be, and on how many ranks."""

    num_tokens: int
    """Of a microbatch of one rank, padding included."""
    length_round: LengthRound
    width_multiple: int = 1
    """Of every width: the tensor-parallel ranks under sequence parallelism."""
    num_ranks: int = 1
    group_size: int = 1
    """The number of microbatches of a rank is a multiple of this."""
    one_shape: bool = False
    sequence_multiple: int = 1
    """Of the length of each sequence of a pack, which context-parallel ranks divide."""

    def width(self, length: int) -> int:
        """The width that a length is filled up to."""
        width = rounded_length(length, self.length_round)
        return -(-width // self.width_multiple) * self.width_multiple

    def packed(self, lengths: Lengths) -> int:
        """Positions that the rows of a sample take in a pack."""
        return sum(rounded_length(length, self.sequence_multiple) for length in lengths)


@dataclass(frozen=True)
class PlannedMicrobatch:
    """Samples by number; `num_filled` repetitions of some sample without weight follow them."""

    samples: tuple[int, ...]
    num_filled: int
    width: int
    """Positions of each row, or of the pack."""


@dataclass(frozen=True)
class MicrobatchSplit:
    """How a rank's rows are cut: the next `sizes[i]` rows, `widths[i]` positions wide, are microbatch i."""

    sizes: tuple[int, ...]
    widths: tuple[int, ...]
    is_packed: bool


MicrobatchPlan = list[list[PlannedMicrobatch]]
"""Microbatches of each rank."""


def plan_padded(samples: Sequence[Lengths], budget: TokenBudget) -> MicrobatchPlan:
    """Plan dynamic batching: rows x width of a microbatch are within the budget.

    A sample that is longer than the budget has a microbatch of its own; the configuration rules that out.
    """
    num_rows = len(samples[0])
    longest = [max(lengths) for lengths in samples]

    def width(numbers: Sequence[int]) -> int:
        return budget.width(max((longest[number] for number in numbers), default=min(longest)))

    def capacity(numbers: Sequence[int]) -> int:
        return max(1, budget.num_tokens // (num_rows * width(numbers)))

    if budget.one_shape:
        return _plan_one_shape(len(samples), capacity(range(len(samples))), width(range(len(samples))), budget)
    order = sorted(range(len(samples)), key=lambda number: -longest[number])
    cut: list[list[int]] = []
    while order:
        size = capacity(order[:1])
        cut.append(order[:size])
        order = order[size:]
    cut = _to_multiple(cut, budget, lambda numbers: len(numbers) * width(numbers), _halves)
    return _deal([(numbers, width(numbers)) for numbers in cut], budget, lambda numbers, width: len(numbers) * width)


def _plan_one_shape(num_samples: int, capacity: int, width: int, budget: TokenBudget) -> MicrobatchPlan:
    group = budget.num_ranks * budget.group_size
    num_microbatches = -(-num_samples // (capacity * group)) * group
    size = -(-num_samples // num_microbatches)
    starts = [index * size for index in range(num_microbatches)]
    cut = [tuple(range(start, min(start + size, num_samples))) for start in starts]
    microbatches = [PlannedMicrobatch(numbers, size - len(numbers), width) for numbers in cut]
    return [microbatches[rank :: budget.num_ranks] for rank in range(budget.num_ranks)]


def plan_packed(
    samples: Sequence[Lengths],
    budget: TokenBudget,
    algorithm: Literal["concatenative", "first_fit_decreasing", "modified_first_fit_decreasing"],
) -> MicrobatchPlan:
    """Plan packing: the filled-up pack is within the budget, with the same exception as in `plan_padded`."""
    sizes = [budget.packed(lengths) for lengths in samples]
    fitting = (size for size in range(budget.num_tokens, 0, -1) if budget.width(size) <= budget.num_tokens)
    capacity = max(next(fitting, 1), *sizes)

    def num_tokens(numbers: Sequence[int]) -> int:
        return sum(sizes[number] for number in numbers)

    packs = BINS[algorithm](sizes, capacity)
    packs = _to_multiple(packs, budget, num_tokens, lambda pack: (pack[::2], pack[1::2]))
    shortest = min(range(len(samples)), key=lambda number: max(samples[number]))  # which fills empty packs
    widths = [budget.width(num_tokens(pack) or sizes[shortest]) for pack in packs]
    if budget.one_shape:
        widths = [max(widths)] * len(widths)
    return _deal(list(zip(packs, widths, strict=True)), budget, lambda pack, width: num_tokens(pack))


def _halves(numbers: list[int]) -> tuple[list[int], list[int]]:
    middle = len(numbers) // 2
    return numbers[:middle], numbers[middle:]


def _to_multiple(
    cut: list[list[int]],
    budget: TokenBudget,
    cost: Callable[[Sequence[int]], int],
    split: Callable[[list[int]], tuple[list[int], list[int]]],
) -> list[list[int]]:
    """Split the costliest, until the number of microbatches is one that the ranks can share; else add empty ones."""
    cut = list(cut)
    while len(cut) % (budget.num_ranks * budget.group_size):
        divisible = [index for index, numbers in enumerate(cut) if len(numbers) > 1]
        if divisible:
            cut.extend(split(cut.pop(max(divisible, key=lambda index: cost(cut[index])))))
        else:
            cut.append([])
    return cut


def _deal(
    cut: Sequence[tuple[list[int], int]], budget: TokenBudget, cost: Callable[[list[int], int], int]
) -> MicrobatchPlan:
    """In rounds of one microbatch for each rank, costliest first; in each, the rank with the least so far gets most."""
    ordered = sorted(cut, key=lambda item: -cost(*item))
    plan: MicrobatchPlan = [[] for _ in range(budget.num_ranks)]
    loads = [0] * budget.num_ranks
    for start in range(0, len(ordered), budget.num_ranks):
        by_load = sorted(range(budget.num_ranks), key=lambda rank: loads[rank])
        for rank, (numbers, width) in zip(by_load, ordered[start : start + budget.num_ranks], strict=True):
            plan[rank].append(PlannedMicrobatch(tuple(numbers), int(not numbers), width))
            loads[rank] += cost(numbers, width)
    return plan
