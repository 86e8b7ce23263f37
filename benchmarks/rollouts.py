"""Steps of different sizes, as rollouts make them, and what a memory manager made of them. Pure Python."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nemo_rl_offload.batching.plan import MicrobatchSplit, TokenBudget, plan_packed

NUM_SAMPLES = (4, 24)
"""Fewest and most of a step: groups without a spread of rewards are left out."""
MEDIAN_SHARE, SIGMA = 0.1, 1.0
"""Of the longest response, and of the logarithm of lengths: the mean is 1.6 times the median."""
_MIN_SLAB_BYTES, _MAX_SLAB_BYTES = 16 << 20, 1 << 30


@dataclass(frozen=True)
class Rollout:
    """Lengths of a step's rows, in the order of its microbatches."""

    lengths: tuple[int, ...]
    split: MicrobatchSplit


def draw(num_steps: int, longest: int, seed: int) -> list[Rollout]:
    """Log-normal lengths of up to `longest` tokens, packed into microbatches of at most that many."""
    generator = random.Random(seed)
    return [_draw_one(generator, longest) for _ in range(num_steps)]


def _draw_one(generator: random.Random, longest: int) -> Rollout:
    drawn = [
        min(longest, max(8, round(MEDIAN_SHARE * longest * generator.lognormvariate(0, SIGMA))))
        for _ in range(generator.randint(*NUM_SAMPLES))
    ]
    budget = TokenBudget(longest, length_round=min(64, longest))
    (microbatches,) = plan_packed([[length] for length in drawn], budget, "modified_first_fit_decreasing")
    lengths = tuple(drawn[number] for microbatch in microbatches for number in microbatch.samples)
    sizes = tuple(len(microbatch.samples) for microbatch in microbatches)
    return Rollout(
        lengths, MicrobatchSplit(sizes, tuple(microbatch.width for microbatch in microbatches), is_packed=True)
    )


def largest(rollouts: Sequence[Rollout]) -> int:
    """Number of the step that needs most: the one with the widest microbatch, and of those the one with most tokens."""
    return max(range(len(rollouts)), key=lambda n: (max(rollouts[n].split.widths), sum(rollouts[n].split.widths), -n))


def slab_bytes(capacity_bytes: int) -> int:
    """The arena's next slab beside so many bytes: a power of two of about a sixteenth."""
    usual = 1 << max(0, (capacity_bytes // 16).bit_length() - 1)
    return min(max(usual, _MIN_SLAB_BYTES), _MAX_SLAB_BYTES)


def figures(entry: dict[str, Any]) -> dict[str, float]:
    """What E3's bars are held against. `alone` are the samples of the largest step by itself, after warming up."""
    steps, alone = entry["steps"], entry["alone"]
    own_peak = max(sample["peak_allocated_bytes"] for sample in alone)
    own_host = max(sample.get("peak_host_bytes", sample.get("host_capacity_bytes", 0)) for sample in alone)
    host = max(sample.get("host_capacity_bytes", 0) for sample in steps)
    highest = max(sample["peak_allocated_bytes"] for sample in steps)
    return {
        "num_steps": len(steps),
        "total_ms": sum(sample["ms"] for sample in steps),
        "highest_peak_bytes": highest,
        "largest_steps_own_peak_bytes": own_peak,
        "peak_over_largest_steps_own": highest / own_peak if own_peak else 0.0,
        "host_bytes": host,
        "largest_steps_own_host_bytes": own_host,
        "slab_bytes": slab_bytes(host),
        "host_less_a_slab_over_largest_steps_own": max(0, host - slab_bytes(host)) / own_host if own_host else 0.0,
    }
