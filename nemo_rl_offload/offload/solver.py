"""Chooses what to keep, offload or recompute, so that a device budget is met at the least time.

Mechanism. Groups stand in forward order. The cost of a choice is what one microbatch loses when its backward
follows its forward at once, the case with the least time to hide copies in:
- forward takes the groups in order; a group's copy leaves when the group is done, copies leave one at a time;
- backward starts when all copies have left (from then on the memory counts as free), takes the groups in
  reverse order, and waits for each one's copy, which come back one at a time in that order.
Both waits then have a closed form. With S_k the time to copy the offloaded groups from k to the last,
    exposed out = max over k of (S_k - forward time of the groups after k), at least 0,
    exposed in  = max over k of (S_k - backward and recompute time of the groups after k), at least 0,
(a serial server's delay: the classical argument for deadlines met in order, Jackson 1955). They depend on sums over
the groups after k only, so a search from the last group to the first can carry them along: a *label* holds the bytes
freed, the bytes offloaded, the recompute time and the two waits; a label that has freed enough is a solution.

The labels are exact until they are too many. Then those whose times are alike, within a quantum that grows until
the rest fit, are represented by the one that frees most: times blur by the quantum, bytes never do, so that the
answer keeps the budget whatever was thinned out, and exists whenever there is one (without a host budget).

Rejected: a greedy order by bytes per exposed millisecond. Groups share the time that hides their copies, so that what
one of them costs depends on the others chosen.

Limit: one link each way at constant rate, and one wait each way: a pipeline hides more. The planner's simulator says
how much.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

_MAX_LABELS = 2000
_MIN_LABELS = 400


class Action(StrEnum):
    """What happens to a group's saved activations."""

    KEEP = "keep"
    OFFLOAD = "offload"
    RECOMPUTE = "recompute"


@dataclass(frozen=True)
class GroupRecord:
    """One module in one layer of a pipeline stage, for one microbatch."""

    module: str
    layer: int
    saved_bytes: int
    """What offloading it takes off the device; a shared storage is charged to its first committer."""
    forward_ms: float
    """Compute time from the end of the group before to the end of this one; also of what cannot be offloaded."""
    backward_ms: float
    recompute_ms: float | None
    """Time to compute it again in backward; None: it cannot be."""
    live_at_peak: int
    """Copies alive at the stage's peak: microbatches in flight."""
    can_offload: bool = True


@dataclass(frozen=True)
class MemoryBudget:
    """Memory of one rank."""

    peak_bytes: int
    """Device memory that may be used."""
    fixed_bytes: int = 0
    """Device memory at the peak that is in no group."""
    host_bytes: int | None = None
    """Host memory that may be used; None: any."""


@dataclass(frozen=True)
class Link:
    """The way between device and host, one copy at a time each way."""

    out_bytes_per_ms: float
    in_bytes_per_ms: float


@dataclass(frozen=True)
class Solution:
    """A choice and what it is predicted to do to one microbatch of one stage."""

    actions: tuple[Action, ...]
    peak_bytes: int
    step_ms: float
    """Forward, backward, recomputation and waiting of one microbatch."""
    exposed_ms: float
    """The part of `step_ms` that waits for copies."""
    host_bytes: int
    shortfall_bytes: int
    """How far `peak_bytes` is above the budget; 0 when it is met."""


def solve(groups: Sequence[GroupRecord], budget: MemoryBudget, link: Link) -> Solution:
    """Choose an action per group, in `groups`' order (forward order), meeting `budget` in the least time.

    When the budget cannot be met, the plan frees what can be freed and `shortfall_bytes` says what is lacking.
    """
    all_bytes = budget.fixed_bytes + sum(group.saved_bytes * group.live_at_peak for group in groups)
    need = min(all_bytes - budget.peak_bytes, sum(map(_freeable, groups)))
    if need <= 0:
        return predict(groups, [Action.KEEP] * len(groups), budget, link)
    actions = _search(groups, need, budget.host_bytes, link)
    return predict(groups, _without_excess(groups, actions, need), budget, link)


def predict(groups: Sequence[GroupRecord], actions: Sequence[Action], budget: MemoryBudget, link: Link) -> Solution:
    """What `actions` do, by the model that this module's text describes."""
    peak_bytes, host_bytes = budget.fixed_bytes, 0
    forward_ms = backward_ms = recompute_ms = exposed_out_ms = exposed_in_ms = 0.0
    offloaded_bytes = 0
    for group, action in zip(reversed(groups), reversed(actions), strict=True):
        live_bytes = group.saved_bytes * group.live_at_peak
        if action is Action.KEEP:
            peak_bytes += live_bytes
        elif action is Action.OFFLOAD:
            host_bytes += live_bytes
            offloaded_bytes += group.saved_bytes
            exposed_out_ms = max(exposed_out_ms, offloaded_bytes / link.out_bytes_per_ms - forward_ms)
            exposed_in_ms = max(exposed_in_ms, offloaded_bytes / link.in_bytes_per_ms - backward_ms - recompute_ms)
        else:
            assert group.recompute_ms is not None
            recompute_ms += group.recompute_ms
        forward_ms += group.forward_ms
        backward_ms += group.backward_ms
    exposed_ms = exposed_out_ms + exposed_in_ms
    return Solution(
        actions=tuple(actions),
        peak_bytes=peak_bytes,
        step_ms=forward_ms + backward_ms + recompute_ms + exposed_ms,
        exposed_ms=exposed_ms,
        host_bytes=host_bytes,
        shortfall_bytes=max(0, peak_bytes - budget.peak_bytes),
    )


def _freeable(group: GroupRecord) -> int:
    can_go = group.can_offload or group.recompute_ms is not None
    return group.saved_bytes * group.live_at_peak if can_go else 0


# Rows of labels, which are columns; bytes, and times in milliseconds.
_FREED, _HOST, _OFFLOADED, _RECOMPUTE, _EXPOSED_OUT, _EXPOSED_IN = range(6)
_CODES = (Action.KEEP, Action.OFFLOAD, Action.RECOMPUTE)
_RADIX = 1024 ** np.arange(4, dtype=np.int64)
_Labels = NDArray[np.float64]


def _search(groups: Sequence[GroupRecord], need: int, host_limit: int | None, link: Link) -> list[Action]:
    """Return the cheapest actions that free `need` bytes or, where the host budget forbids that, the most bytes."""
    limit = max(_MIN_LABELS, min(_MAX_LABELS, 24_000 // len(groups)))
    labels: _Labels = np.zeros((6, 1))
    steps: list[tuple[NDArray[np.intp], NDArray[np.int8], NDArray[np.intp]]] = []
    remaining = sum(map(_freeable, groups))
    best_freed, best_cost, best = -1.0, np.inf, (0, 0)
    forward_ms = backward_ms = quantum_ms = 0.0
    for group in reversed(groups):
        remaining -= _freeable(group)
        labels, parents, codes = _extend(labels, group, forward_ms, backward_ms, link)
        freed = np.minimum(labels[_FREED], need)
        cost = _cost(labels)
        allowed = labels[_HOST] <= (np.inf if host_limit is None else host_limit)
        top = freed[allowed].max()
        found = int(np.where(allowed & (freed == top), cost, np.inf).argmin())
        if top > best_freed or (top == best_freed and cost[found] < best_cost):
            best_freed, best_cost, best = float(top), float(cost[found]), (len(steps), found)
        allowed &= freed < need
        if best_freed >= need:
            allowed &= cost < best_cost
        if host_limit is None:
            allowed &= freed + remaining >= need
        kept, quantum_ms = _thin(labels, np.flatnonzero(allowed), limit, quantum_ms, host_limit, link)
        steps.append((parents, codes, kept))
        labels = labels[:, kept]
        if not len(kept):
            break
        forward_ms += group.forward_ms
        backward_ms += group.backward_ms
    return _trace(steps, best, len(groups))


def _cost(labels: _Labels) -> NDArray[np.float64]:
    cost: NDArray[np.float64] = labels[_RECOMPUTE] + labels[_EXPOSED_OUT] + labels[_EXPOSED_IN]
    return cost


def _extend(
    labels: _Labels, group: GroupRecord, forward_ms: float, backward_ms: float, link: Link
) -> tuple[_Labels, NDArray[np.intp], NDArray[np.int8]]:
    """Return all labels with each action for `group`, the number that each came from, and the code of its action.

    `forward_ms` and `backward_ms` are those of the groups after it.
    """
    variants = [labels]
    codes = [0]
    live_bytes = group.saved_bytes * group.live_at_peak
    if live_bytes and group.can_offload:
        offloaded = labels.copy()
        offloaded[_FREED] += live_bytes
        offloaded[_HOST] += live_bytes
        offloaded[_OFFLOADED] += group.saved_bytes
        out_ms = offloaded[_OFFLOADED] / link.out_bytes_per_ms - forward_ms
        in_ms = offloaded[_OFFLOADED] / link.in_bytes_per_ms - backward_ms - offloaded[_RECOMPUTE]
        np.maximum(offloaded[_EXPOSED_OUT], out_ms, out=offloaded[_EXPOSED_OUT])
        np.maximum(offloaded[_EXPOSED_IN], in_ms, out=offloaded[_EXPOSED_IN])
        variants.append(offloaded)
        codes.append(1)
    if live_bytes and group.recompute_ms is not None:
        recomputed = labels.copy()
        recomputed[_FREED] += live_bytes
        recomputed[_RECOMPUTE] += group.recompute_ms
        variants.append(recomputed)
        codes.append(2)
    number = labels.shape[1]
    parents = np.tile(np.arange(number), len(variants))
    return np.concatenate(variants, axis=1), parents, np.repeat(np.array(codes, dtype=np.int8), number)


def _thin(
    labels: _Labels, rows: NDArray[np.intp], limit: int, quantum_ms: float, host_limit: int | None, link: Link
) -> tuple[NDArray[np.intp], float]:
    """Return at most `limit` of the labels `rows`, and the quantum of time within which the others were alike.

    Of labels alike in cost, recompute and copying time (and, in 16 steps, in host memory) one stays: that frees most.
    """
    if len(rows) <= limit:
        return rows, quantum_ms
    order = rows[np.lexsort((labels[_HOST, rows], -labels[_FREED, rows]))]
    labels = labels[:, order]
    copying_ms = labels[_OFFLOADED] / min(link.out_bytes_per_ms, link.in_bytes_per_ms)
    times = [each - each.min() for each in (_cost(labels), labels[_RECOMPUTE], copying_ms)]
    host = (labels[_HOST] * (16 / host_limit if host_limit else 0)).astype(np.int64) * _RADIX[3]
    span = max(*(float(each.max()) for each in times), 1e-12)
    quantum_ms = max(quantum_ms, span / 1000)  # so that one number holds four coordinates
    while True:
        cells = [(each / quantum_ms).astype(np.int64) for each in times]
        _, first = np.unique(cells[0] + cells[1] * _RADIX[1] + cells[2] * _RADIX[2] + host, return_index=True)
        if len(first) <= limit or quantum_ms > 4 * span:
            return order[first], quantum_ms
        quantum_ms *= 1.5


def _trace(
    steps: Sequence[tuple[NDArray[np.intp], NDArray[np.int8], NDArray[np.intp]]], best: tuple[int, int], num_groups: int
) -> list[Action]:
    """Return the actions of the label `best`, a step and a row there; groups before it are kept."""
    step, row = best
    actions = [Action.KEEP] * num_groups
    while step >= 0:
        parents, codes, _ = steps[step]
        actions[num_groups - 1 - step] = _CODES[codes[row]]
        step -= 1
        if step >= 0:
            row = int(steps[step][2][parents[row]])
    return actions


def _without_excess(groups: Sequence[GroupRecord], actions: Sequence[Action], need: int) -> list[Action]:
    """Keep what was freed beyond `need`, recomputed groups first, then those whose copies have the least time."""
    lean = list(actions)
    excess = sum(
        group.saved_bytes * group.live_at_peak
        for group, action in zip(groups, actions, strict=True)
        if action is not Action.KEEP
    )
    excess -= need
    for wanted in (Action.RECOMPUTE, Action.OFFLOAD):
        for index in reversed(range(len(groups))):
            live_bytes = groups[index].saved_bytes * groups[index].live_at_peak
            if lean[index] is wanted and live_bytes <= excess:
                lean[index] = Action.KEEP
                excess -= live_bytes
    return lean
