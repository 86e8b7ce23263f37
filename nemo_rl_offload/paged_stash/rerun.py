"""A step whose experts got more rows than their buffers or pages hold is run again, without limits.

Nothing on the device says so to the host while the step runs: rows over the capacity are left out, tensors without
pages are lost, and flags are set. After forward and backward one all-reduce tells every rank whether any rank's flags
are; then the gradients are dropped, whatever else the pass changed is put back, and the same microbatches run once more
with buffers of exactly the rows that come, which takes a read on the host a layer. So no step is lost and no token left
out.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_rl_offload.paged_stash.pages import recommended_factor
from nemo_rl_offload.paged_stash.stash import PagedStash
from nemo_rl_offload.paged_stash.stats import StashSizes, StashStats

logger = logging.getLogger(__name__)


class Capacity:
    """How many rows the experts of a rank take: `factor` times the balanced case, where `is_limited`."""

    def __init__(self, factor: float, device: torch.device) -> None:
        self.factor = factor
        self.is_limited = True
        self._is_over = torch.zeros((), dtype=torch.bool, device=device)
        self._largest = torch.zeros((), dtype=torch.float32, device=device)

    def rows(self, num_live: Tensor, balanced_rows: int, *, is_training: bool) -> int:
        """Rows of a buffer for `num_live` (int64 [1], on the device) rows.

        In training, a number known beforehand; what does not fit is noted. Elsewhere, and without limits, exactly as
        many as live, for which the host waits.
        """
        if is_training:
            torch.maximum(self._largest, num_live.max() / max(1, balanced_rows), out=self._largest)
        if not (self.is_limited and is_training):
            return int(num_live)
        rows = max(1, int(balanced_rows * self.factor))
        self._is_over |= num_live.max() > rows
        return rows

    def is_over(self) -> Tensor:
        """Whether any layer got more than its buffer holds since `clear`; bool, on the device."""
        return self._is_over

    def clear(self) -> None:
        """Forget that, for the next step."""
        self._is_over.zero_()

    def needed_factor(self) -> float:
        """The most rows that came to a layer, as a multiple of the balanced case; the host waits for it."""
        return float(self._largest)


@dataclass
class RerunCounts:
    """Steps that were run again, and why."""

    steps: int = 0
    reruns: int = 0
    overflows: int = 0
    over_budget: int = 0
    spilled: int = 0


class StepGuard:
    """Runs a step's forward and backward, and again where buffers or pages did not suffice on any rank.

    `save` notes what a pass changes besides gradients (random states, buffers) and returns what puts it back;
    `reduce` replaces a float tensor by its maximum over all ranks.
    """

    def __init__(
        self,
        capacity: Capacity,
        stash: PagedStash | None,
        *,
        save: Callable[[], Callable[[], None]],
        reduce: Callable[[Tensor], None],
    ) -> None:
        self.capacity, self.stash = capacity, stash
        self.counts = RerunCounts()
        self._save, self._reduce = save, reduce
        self._is_sized = stash is None
        self._last_reruns = 0

    def run[T](self, attempt: Callable[[], T]) -> T:
        """What `attempt`, which clears the gradients, runs forward and backward over a step's batches, returns.

        The first step with a stash runs without limits and shows how many pages there should be.
        """
        self.counts.steps += 1
        reruns = self.counts.reruns
        outputs = self._run(attempt)
        self._last_reruns = self.counts.reruns - reruns
        return outputs

    def _run[T](self, attempt: Callable[[], T]) -> T:
        self.capacity.is_limited = True  # whatever an interrupted step left
        if self.stash is not None:
            self.stash.is_paging = self._is_sized
        if not self._is_sized:
            outputs = self._without_limits(attempt)
            self._is_sized = True
            return outputs
        put_back = self._save()
        outputs = attempt()
        overflow, over_budget, spilled = self._flags()
        self.counts.spilled += spilled
        if not (overflow or over_budget):
            return outputs
        del outputs
        self.counts.reruns += 1
        self.counts.overflows += overflow
        self.counts.over_budget += over_budget
        put_back()
        outputs = self._without_limits(attempt)
        self._warn(overflow, over_budget)
        return outputs

    def metrics(self) -> dict[str, float]:
        """Of the last step, for loggers."""
        return {"paged_stash/reruns": float(self._last_reruns)}

    def stats(self) -> StashStats:
        """Counts over all steps, factors that they needed on this rank, and the stash's sizes in bytes."""
        counts, stash = self.counts, self.stash
        sizes: StashSizes = {} if stash is None else stash.sizes()
        return {
            "steps": counts.steps,
            "reruns": counts.reruns,
            "overflows": counts.overflows,
            "over_budget": counts.over_budget,
            "spilled": counts.spilled,
            "needed_capacity_factor": self.capacity.needed_factor(),
            "needed_stash_factor": None if stash is None else stash.needed_factor(),
            **sizes,
        }

    def _flags(self) -> tuple[bool, bool, bool]:
        """(a stash was full, a buffer was full, rows went to the host), on any rank."""
        is_over = self.capacity.is_over().view(1)
        if self.stash is None:
            flags = torch.cat([torch.zeros_like(is_over), is_over, torch.zeros_like(is_over)])
        else:
            self.stash.end_step()
            of_stash = self.stash.flags()
            flags = torch.cat([of_stash[:1], is_over, of_stash[1:]])
            self.stash.clear_flags()
        values = flags.float()
        self.capacity.clear()
        self._reduce(values)
        overflow, over_budget, spilled = (value > 0 for value in values.tolist())
        return overflow, over_budget, spilled

    def _without_limits[T](self, attempt: Callable[[], T]) -> T:
        self.capacity.is_limited = False
        if self.stash is not None:
            self.stash.is_paging = False
        outputs = attempt()
        self.capacity.is_limited = True
        if self.stash is not None:
            self.stash.resize()
            self.stash.is_paging = True
        return outputs

    def _warn(self, overflow: bool, over_budget: bool) -> None:
        factors = torch.tensor(
            [self.capacity.needed_factor(), (self.stash and self.stash.needed_factor()) or 0.0],
            device=self.capacity.is_over().device,
        )
        self._reduce(factors)
        capacity_factor, stash_factor = factors.tolist()
        hints = []
        if over_budget:
            hints.append(f"moe_expert_rank_capacity_factor: {recommended_factor(capacity_factor)}")
        if overflow:
            hints.append(f"moe_paged_stash_buffer_size_factor_cuda: {recommended_factor(stash_factor)}")
        logger.warning(
            "a step ran again without limits (%d of %d), because %s; to avoid it, set %s",
            self.counts.reruns,
            self.counts.steps,
            " and ".join(
                ["the experts' buffers were too small"] * over_budget + ["the paged stash was full"] * overflow
            ),
            ", ".join(hints),
        )
