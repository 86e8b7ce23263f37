"""Order of forward and backward passes on each pipeline stage, as Megatron-Core runs them: 1F1B and interleaved 1F1B.

Narayanan et al. 2021 (arXiv 2104.04473), section 2.2; Megatron-Core's `get_pp_rank_microbatches` and
`get_schedule_table` have the counts.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple


class PipelinePass(NamedTuple):
    """One microbatch through the layers of one chunk, there or back."""

    forward: bool
    chunk: int
    microbatch: int


Schedule = Sequence[Sequence[PipelinePass]]
"""The passes of each pipeline stage, in order."""


@lru_cache(maxsize=8)
def pipeline_schedule(num_stages: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """Return the passes of each stage; more than one chunk means interleaving.

    Before its first backward, stage r of p runs p - r forwards, or 2(p - r - 1) + (chunks - 1) p + 1 with interleaving;
    then backward and forward take turns.
    """
    order = _chunk_order(num_stages, num_microbatches, num_chunks)
    forwards = [PipelinePass(True, chunk, microbatch) for chunk, microbatch in order]
    backwards = [PipelinePass(False, num_chunks - 1 - chunk, microbatch) for chunk, microbatch in order]
    return [
        _one_stage(forwards, backwards, num_warmup_passes(num_stages, stage, num_chunks)) for stage in range(num_stages)
    ]


def num_warmup_passes(num_stages: int, stage: int, num_chunks: int) -> int:
    """Forward passes of a stage before its first pair of a forward and a backward pass, given enough microbatches."""
    behind = num_stages - stage - 1
    return behind if num_chunks == 1 else 2 * behind + (num_chunks - 1) * num_stages


def _chunk_order(num_stages: int, num_microbatches: int, num_chunks: int) -> list[tuple[int, int]]:
    if num_chunks == 1:
        return [(0, microbatch) for microbatch in range(num_microbatches)]
    return [
        (chunk, microbatch)
        for first in range(0, num_microbatches, num_stages)
        for chunk in range(num_chunks)
        for microbatch in range(first, min(first + num_stages, num_microbatches))
    ]


def _one_stage(forwards: list[PipelinePass], backwards: list[PipelinePass], num_warmup: int) -> list[PipelinePass]:
    passes = forwards[:num_warmup]
    for index, forward in enumerate(forwards[num_warmup:]):
        passes += [forward, backwards[index]]
    return passes + backwards[max(0, len(forwards) - num_warmup) :]


def live_passes(passes: Sequence[PipelinePass]) -> list[int]:
    """Return, after each pass of a stage, how many forward passes wait for their backward."""
    counts, alive = [], 0
    for each in passes:
        alive += 1 if each.forward else -1
        counts.append(alive)
    return counts
