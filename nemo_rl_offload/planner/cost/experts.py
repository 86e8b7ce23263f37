"""Buffers of fixed size for the experts, and the paged stash: what they add to a stage, and which factors to set.

With `moe_expert_rank_capacity_factor` alone, what a layer's experts save is that many times the balanced case. With the
stash only the pages are: its device factor times the balanced case, whatever the capacity, and one layer's buffers at
full capacity exist at a time. Rows on the host are in pinned memory that is taken once.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.paged_stash.pages import recommended_factor
from nemo_rl_offload.planner.cost.storages import Storage
from nemo_rl_offload.specs.documents import RUN_BYTES, DocumentError, read_json_object
from nemo_rl_offload.specs.offload_modules import STASHED_MODULES


@dataclass(frozen=True)
class Skew:
    """The most that was needed, as multiples of the balanced case."""

    rows: float
    """Of one layer's rows on one rank."""
    pages: float
    """Of the pages that a rank needed at a time; they belong to many layers and microbatches, which differ less."""


@dataclass(frozen=True)
class ExpertBuffers:
    """The keys of the experts' buffers; factors are multiples of the balanced case."""

    capacity_factor: float | None = None
    has_stash: bool = False
    device_factor: float = 1.1
    host_factor: float = 0.0
    skew: Skew | None = None

    def saved(self, storages: Sequence[Storage]) -> list[Storage]:
        """What a layer with experts saves, given what it would save with as many rows as come."""
        if self.capacity_factor is None:
            return list(storages)
        if not self.has_stash:
            return [_times(storage, self.capacity_factor) if _is_of_rows(storage) else storage for storage in storages]
        factor = self._of_tier(self.device_factor)
        return [replace(_times(each, factor), modules=()) if _is_of_rows(each) else each for each in storages]

    def alive_bytes(self, storages: Sequence[Storage]) -> int:
        """One layer's buffers at full capacity, beside the pages; nothing without a stash."""
        if self.capacity_factor is None or not self.has_stash:
            return 0
        return round(self.capacity_factor * self._balanced_bytes(storages))

    def host_bytes(self, storages: Sequence[Storage]) -> int:
        """Pinned pages for one layer and microbatch."""
        return round(self._of_tier(self.host_factor) * self._balanced_bytes(storages)) if self.has_stash else 0

    def recommended(self) -> dict[str, float]:
        """Keys and factors for the skew; none without one."""
        if self.skew is None:
            return {}
        return {
            "moe_expert_rank_capacity_factor": recommended_factor(self.skew.rows),
            "moe_paged_stash_buffer_size_factor_cuda": recommended_factor(self.skew.pages),
        }

    def _of_tier(self, factor: float) -> float:
        """Negative factors are multiples of the most needed."""
        return factor if factor >= 0 else -factor * (self.skew.pages if self.skew else 1.0)

    @staticmethod
    def _balanced_bytes(storages: Sequence[Storage]) -> int:
        return sum(storage.num_bytes for storage in storages if _is_of_rows(storage) and storage.live)


def _is_of_rows(storage: Storage) -> bool:
    return any(module in STASHED_MODULES for module in storage.modules)


def _times(storage: Storage, factor: float) -> Storage:
    return replace(
        storage, num_bytes=round(storage.num_bytes * factor), num_elements=round(storage.num_elements * factor)
    )


def recorded_skew(summary: Path) -> Skew:
    """What a run's `summary.json` says that its experts needed.

    Raises ConfigError where there is no such file, or the run had no buffers of fixed size.
    """
    try:
        stash = read_json_object(summary, RUN_BYTES)["paged_stash"]
        needed = None if stash is None else [stash[key] for key in ("needed_capacity_factor", "needed_stash_factor")]
    except (OSError, DocumentError, KeyError, TypeError) as error:
        why = f": {error}" if isinstance(error, DocumentError) else ""
        raise ConfigError(f"--recorded-run {summary.parent}: no summary.json of a finished run there{why}.") from error
    if needed is None:
        raise ConfigError(
            f"--recorded-run {summary.parent}: that run had no moe_expert_rank_capacity_factor, and so counted nothing."
        )
    rows, pages = needed[0], needed[1] or needed[0]
    if not all(isinstance(value, int | float) and 0 <= value < math.inf for value in (rows, pages)):
        raise ConfigError(f"--recorded-run {summary}: paged_stash has factors that are no numbers. Restore the file.")
    return Skew(rows, pages)
