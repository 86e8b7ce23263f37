"""`offload_modules: auto`: choose which groups stay on the device, so that a device budget is just met.

Mechanism. The first step offloads everything. After it, and after some later steps (`FIRST_PLANS`, then every
`PLAN_EVERY`), `_make_plan` asks `solver.solve` anew, with:
- each group with its measured bytes and times;
- how many of each group were alive when most bytes were alive;
- the link's measured rates;
- what of the peak is in no group, `fixed = measured peak - bytes of groups on the device`;
- what is on its way, `moving = bytes of groups on the device - those that stay`. Before there is a plan that is taken
  to be two of the largest groups.
What the plan keeps stays from then on (`Selection.keep`), and the engine moves the others. Lengths change from step to
step, so a plan is made for the largest step since the last plan.

Waiting. Copies out may lag as far as the budget has room: compute waits for them only where the next group would not
fit, and nothing is brought back ahead of time that would not fit. A fixed bound on bytes under way made compute wait
for copies that the rest of the forward would have hidden.

The peak. It is counted from a step's first commit to its end; what evaluation or the optimizer hold between steps would
pass for a part of it otherwise. The peak and the most bytes of groups may lie at different moments, so `fixed` is only
a lower bound: the highest of such bounds counts, as long as steps are alike (`ALIKE`). The first step does not count,
for it offloads everything, and its peak may lie where groups have little. What a step takes above the budget all the
same counts as moving from then on. In random models on the simulated device, budgets that can be met are kept
(`tests/unit/offload/test_simulated_budget.py`).

Ranks. Data- and tensor-parallel ranks of a pipeline stage must plan alike: they share the maximum of their measurements
(`reduce_max_over_ranks`). That is a collective call. So plans are made at fixed numbers of steps, and every rank takes
part, also one whose own steps saved nothing.

Rejected: a plan for each step's lengths, which would have to be known before the forward.

Limit: memory that is neither in a group nor in the measured steps, such as another phase's peak, is not foreseen.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

from nemo_rl_offload.offload.backends.base import Backend
from nemo_rl_offload.offload.copies import Copies
from nemo_rl_offload.offload.selection import Selection
from nemo_rl_offload.offload.slots import Group, Key
from nemo_rl_offload.offload.solver import Action, GroupRecord, Link, MemoryBudget, Solution, solve
from nemo_rl_offload.offload.timing import Timing
from nemo_rl_offload.units import GIB, KIB, MIB

FIRST_PLANS = (1, 2, 3, 5)
PLAN_EVERY = 8
DRIFT = 0.02  # of the budget: a peak this far below it means that a group too many was offloaded
ALIKE = 0.1  # relative: steps whose bytes differ more teach each other nothing about what is on its way
NOMINAL_BYTES_PER_MS = 50e6  # where nothing can be measured: on a CPU, a group computes as long as its copy would take


class Measured(NamedTuple):
    """One rank's measurements."""

    step: tuple[float, ...]
    """Bytes at the peak, resident ones, those of them that are to move, ms a byte out and in; bytes that others hold on
    the host."""
    groups: dict[Key, tuple[float, ...]]
    """In the order of first commits: bytes, forward's and backward's ms, how many are alive at the peak."""


type ReduceOverRanks = Callable[[Measured], Measured]
"""`reduce_max_over_ranks` over the ranks that have to plan alike."""


class MemoryBudgetController:
    """Plans for one engine. `budget_bytes` is device memory, `host_budget_bytes` this rank's host memory."""

    def __init__(self, budget_bytes: int, host_budget_bytes: int, reduce_max: ReduceOverRanks | None = None) -> None:
        self._budget_bytes, self._host_budget_bytes = budget_bytes, host_budget_bytes
        self._reduce_max = reduce_max or (lambda measured: measured)
        self._visits: list[tuple[Group, bool]] = []
        self._largest: list[tuple[Group, bool]] = []
        self._largest_bytes = 0
        self._peak_bytes = 0
        self._num_steps = 0
        self._is_training = False
        self._warned = False
        self._moving_bytes = 0
        self._fixed_bytes = 0
        self._planned_bytes = 0
        self._limit_bytes: int | None = None  # of groups' bytes on the device
        self._group_bytes: dict[Key, int] = {}  # of all ranks that plan alike, in the order of first commits
        self._following_bytes: dict[Key, int] = {}  # of the group that is committed after one
        # What the groups behind one take at once: all that are kept, and one that moves.
        self._later_bytes: dict[Key, int] = {}
        self.plan: Solution | None = None
        """The plan in force."""

    def begin(self) -> None:
        """A region of a step with a backward was committed, whether or not it saved something."""
        self._is_training = True

    def forget_step(self) -> None:
        """Drop a step that was cut off."""
        self._visits, self._is_training = [], False

    def visit(self, group: Group, forward: bool, backend: Backend) -> int | None:
        """A commit of `group`, or backward's arrival there. The first of a step starts the allocator's peak anew.

        Returns how many bytes of groups the device may hold now, so that the next group has room; None: unknown.
        """
        if not self._visits:
            backend.reset_peak()
        self._visits.append((group, forward))
        if self._limit_bytes is None:
            return None
        return self._limit_bytes - (self._following_bytes.get(group.key, 0) if forward else 0)

    def has_room(self, group: Group, staying_bytes: int) -> bool:
        """Whether `group` may stay although the plan moves it, beside `staying_bytes`, itself included, and what of the
        forward to come has to be on the device at once."""
        if self._limit_bytes is None:
            return True
        return staying_bytes + self._later_bytes.get(group.key, 0) <= self._limit_bytes

    def end_step(self, backend: Backend, copies: Copies, timing: Timing, selection: Selection) -> None:
        """Remember the step when it is the largest; at the steps where that is due, plan.

        Whether it is due must not depend on what this rank saved: the others would wait for it.
        """
        num_bytes = sum(group.saved_bytes for group, forward in self._visits if forward)
        if num_bytes > self._largest_bytes:
            self._largest, self._largest_bytes = self._visits, num_bytes
        if self._visits:
            self._peak_bytes = max(self._peak_bytes, backend.peak_bytes() or 0)
        self._visits = []
        if not self._is_training:
            return
        self._is_training = False
        self._num_steps += 1
        if self._num_steps not in FIRST_PLANS and self._num_steps % PLAN_EVERY != 0:
            return
        backend.synchronize()
        timing.end_step()
        resident_bytes = copies.take_peak_resident_bytes()
        peak_bytes = self._peak_bytes or resident_bytes
        self._make_plan(peak_bytes, resident_bytes, copies.held_host_bytes, timing, selection)
        if self.plan is not None:
            self._limit(selection)
        self._largest, self._largest_bytes, self._peak_bytes = [], 0, 0

    def _limit(self, selection: Selection) -> None:
        """What groups may take on the device under the plan in force, and what those behind each group need of it."""
        assert self.plan is not None
        limit_bytes = self._budget_bytes - self._fixed_bytes
        self._limit_bytes = None if self._is_short(limit_bytes) else limit_bytes
        self._following_bytes = {
            former: num_bytes for (former, _), (_, num_bytes) in pairwise(self._group_bytes.items())
        }
        self._later_bytes, later_bytes = {}, 0
        for key, num_bytes in reversed(self._group_bytes.items()):
            self._later_bytes[key] = later_bytes
            kept_bytes = num_bytes if key in selection.kept else 0
            later_bytes = max(num_bytes, kept_bytes + later_bytes)

    def _is_short(self, limit_bytes: int) -> bool:
        """Whether waiting for copies would not help: with no room for two groups, one of them on its way."""
        assert self.plan is not None
        return self.plan.shortfall_bytes > 0 and limit_bytes < 2 * max(self._group_bytes.values())

    def _make_plan(
        self, peak_bytes: int, resident_bytes: int, held_host_bytes: int, timing: Timing, selection: Selection
    ) -> None:
        rates = [timing.copy_ms(1, out) or 1 / NOMINAL_BYTES_PER_MS for out in (True, False)]
        groups = self._groups(timing)
        kept_bytes = sum(size * alive for key, (size, _, _, alive) in groups.items() if not selection.eligible(key))
        step = (peak_bytes, resident_bytes, resident_bytes - kept_bytes, *rates, held_host_bytes)
        (peak, resident, on_its_way, out_ms, in_ms, held_host), shared = self._reduce_max(Measured(step, groups))
        if not shared:
            return
        peak_bytes, resident_bytes = int(peak), int(resident)
        self._group_bytes = {key: int(values[0]) for key, values in shared.items()}
        keys = list(self._group_bytes)
        records = [
            GroupRecord(key[0], position, int(size), forward, backward, None, int(num_alive))
            for position, key in enumerate(keys)
            for size, forward, backward, num_alive in [shared[key]]
        ]
        num_bytes = sum(r.saved_bytes * r.live_at_peak for r in records)
        is_alike = abs(num_bytes - self._planned_bytes) < ALIKE * num_bytes
        was_planned = self._num_steps > FIRST_PLANS[1]  # the step of the former figure; none was in the first
        former_fixed_bytes = self._fixed_bytes if is_alike and was_planned else 0
        fixed_bytes = self._fixed_bytes = max(former_fixed_bytes, peak_bytes - resident_bytes)
        moving_bytes = 2 * max(r.saved_bytes for r in records)
        if self.plan is not None:
            if self._budget_bytes * (1 - DRIFT) <= peak_bytes <= self._budget_bytes:
                return
            moving_bytes = int(on_its_way)
            if is_alike:
                excess_bytes = peak_bytes - self._budget_bytes - (fixed_bytes - former_fixed_bytes)
                moving_bytes = max(moving_bytes, self._moving_bytes + max(0, excess_bytes))
        self._moving_bytes, self._planned_bytes = moving_bytes if is_alike else 0, num_bytes
        host_bytes = max(0, self._host_budget_bytes - int(held_host))
        budget = MemoryBudget(self._budget_bytes, fixed_bytes + moving_bytes, host_bytes)
        was_tried, self.plan = self.plan is not None, solve(records, budget, Link(1 / out_ms, 1 / in_ms))
        actions = zip(keys, self.plan.actions, strict=True)
        selection.keep([key for key, action in actions if action is Action.KEEP])
        was_tried &= self._is_short(self._budget_bytes - fixed_bytes) or self._num_steps > FIRST_PLANS[-1]
        if self.plan.shortfall_bytes and was_tried and peak_bytes > self._budget_bytes and not self._warned:
            self._warned = True
            warnings.warn(self._shortfall_message(fixed_bytes, records), stacklevel=2)

    def _groups(self, timing: Timing) -> dict[Key, tuple[float, ...]]:
        """One entry a key, in the order of first commits: of the largest of its groups."""
        largest_groups: dict[Key, Group] = {}
        for group, forward in self._largest:
            former = largest_groups.get(group.key)
            if forward and (former is None or group.saved_bytes > former.saved_bytes):
                largest_groups[group.key] = group
        alive = alive_at_peak(self._largest)
        measured: dict[Key, tuple[float, ...]] = {}
        for key, group in largest_groups.items():
            nominal_ms = group.saved_bytes / NOMINAL_BYTES_PER_MS
            times = (timing.forward_ms(group) or nominal_ms, timing.backward_ms(group) or nominal_ms)
            measured[key] = (group.saved_bytes, *times, alive[key])
        return measured

    def _shortfall_message(self, fixed_bytes: int, records: Sequence[GroupRecord]) -> str:
        assert self.plan is not None
        moved_bytes = sum(r.saved_bytes * r.live_at_peak for r in records)
        return (
            f"gpu_memory_budget: {_size(self._budget_bytes)} cannot be met by offloading. The peak is "
            f"{_size(self.plan.peak_bytes)}, {_size(self.plan.shortfall_bytes)} too much; {_size(fixed_bytes)} of it "
            f"are not saved activations of offloadable modules ({_size(moved_bytes)} of those can go). Use a smaller "
            f"microbatch or sequence, more parallelism or recomputation, or raise the budget."
        )


def reduce_max_over_ranks(measured: Sequence[Measured]) -> Measured:
    """The element-wise maximum over ranks, of every group that one of them has; groups in the order of the rank that
    has most, then of the others'."""
    groups: dict[Key, tuple[float, ...]] = {}
    for each in sorted(measured, key=lambda each: len(each.groups), reverse=True):
        for key, values in each.groups.items():
            groups[key] = tuple(map(max, values, groups.get(key, values)))
    return Measured(tuple(map(max, zip(*(each.step for each in measured), strict=True))), groups)


def alive_at_peak(visits: Sequence[tuple[Group, bool]]) -> Counter[Key]:
    """How many groups of each key are alive when the bytes alive are most; an entry that is False ends one."""
    alive: Counter[Key] = Counter()
    alive_bytes = most_bytes = 0
    at_peak: Counter[Key] = Counter()
    falling = False
    for group, forward in visits:
        if forward:
            alive[group.key] += 1
            alive_bytes += group.saved_bytes
            falling = False
        else:
            if not falling and alive_bytes > most_bytes:
                most_bytes, at_peak = alive_bytes, alive.copy()
            falling = True
            alive[group.key] -= 1
            alive_bytes -= group.saved_bytes
    return at_peak if at_peak else alive


def _size(num_bytes: int) -> str:
    units = ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"), (1, "bytes"))
    unit, name = next((each for each in units if num_bytes >= each[0]), units[-1])
    return f"{num_bytes / unit:.4g} {name}"
