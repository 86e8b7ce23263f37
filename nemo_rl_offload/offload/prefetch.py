"""Brings back what backward will want next, at the last boundary that is early enough."""

from itertools import islice

from nemo_rl_offload.offload.copies import Copies
from nemo_rl_offload.offload.passes import Order
from nemo_rl_offload.offload.schedule import MARGIN, Need, latest_starts_ms, num_due
from nemo_rl_offload.offload.slots import Group, Phase
from nemo_rl_offload.offload.timing import Timing

LATENCY_MS = 0.03  # a copy is taken for starting this late
HORIZON = 16  # groups looked at


class Prefetch:
    """Not thread-safe: the engine's lock is held around every call."""

    def __init__(self, order: Order, timing: Timing, copies: Copies, max_bytes: int | None) -> None:
        self._order, self._timing, self._copies = order, timing, copies
        self._max_bytes = max_bytes
        self._now_ms = self._reached_ms = 0.0  # by usual durations; and when backward was at the group reached last
        self._before: tuple[Group, bool, Phase] | None = None  # the last boundary
        self._idle = -1, 0.0  # the order's version, and until when nothing is to be started there

    def boundary(self, group: Group, forward: bool) -> None:
        """A commit, or a backward that has reached `group`: clocks go on, this one by the interval usual here, that of
        the copies by the shortest, since reloads must not be late, nor copies be taken for done too early."""
        if self._before is not None and self._timing.has_clock:
            self._now_ms += self._timing.after_ms(*self._before) or 0.0
            self._copies.now_ms += self._timing.at_least_ms(*self._before[:2], forward)
        self._before = group, forward, self._order.phase
        if not forward:
            self._reached_ms = self._now_ms
        self._timing.boundary(*self._before)

    def ahead(self, group: Group, forward: bool) -> None:
        """Start the reloads that cannot wait for the boundary after this one, as far as the byte cap allows.

        As long as durations are unknown, every boundary of a backward starts as many of its pass as the cap allows;
        where copies are not asynchronous, none.
        """
        former = self._order.latest
        if former is None or not self._timing.has_clock:
            return
        next_boundary_ms = self._timing.after_ms(group, forward, self._order.phase)
        if next_boundary_ms is None:
            if not forward:
                self._as_many_as_fit(former)
            return
        version, idle_until_ms = self._idle
        if version == self._order.version and self._now_ms + next_boundary_ms <= idle_until_ms:
            return
        first_due_ms = next_boundary_ms if forward and self._order.first_backward_follows(group) else None
        groups, first_start_ms = self._due(former, next_boundary_ms, first_due_ms)
        for each in groups:
            self._copies.reload_group(each)
        self._idle = (-1, 0.0) if groups else (self._order.version, self._now_ms + first_start_ms)

    def _due(self, former: Group, next_boundary_ms: float, first_due_ms: float | None) -> tuple[list[Group], float]:
        """What cannot wait, and in how many ms the first reload has to start. `first_due_ms` is when backward comes,
        where that is known better than by the time since the last one."""
        needs: list[Need] = []
        groups: list[Group] = []
        num_fitting = 0
        room = self._copies.bound_bytes(self._max_bytes) - self._copies.unused_bytes
        due_ms = self._reached_ms - self._now_ms
        for following in islice(self._order.upcoming(former), HORIZON):
            due_ms = due_ms + self._interval_ms(former, following) if first_due_ms is None else first_due_ms
            former, first_due_ms = following, None
            num_bytes = following.pending_bytes
            if num_bytes == 0:
                continue
            room -= num_bytes
            num_fitting += room >= 0
            copy_ms = self._timing.copy_ms(num_bytes, out=False)
            groups.append(following)
            needs.append(Need(due_ms, float("inf") if copy_ms is None else copy_ms * MARGIN + LATENCY_MS))
        starts_ms = latest_starts_ms(needs)
        due = groups[: min(num_due(starts_ms, next_boundary_ms), num_fitting)]
        return due, starts_ms[0] if starts_ms else float("inf")

    def _as_many_as_fit(self, group: Group) -> None:
        """Nothing is known: reload what comes next, within the cap; where the last such call stopped, go on."""
        pass_ = group.pass_
        for following in pass_.before(min(group.index, pass_.loaded_to)):
            if self._copies.unused_bytes + following.pending_bytes > self._copies.bound_bytes(self._max_bytes):
                return
            self._copies.reload_group(following)
            pass_.loaded_to = following.index

    def _interval_ms(self, former: Group, group: Group) -> float:
        if former.pass_ is group.pass_:
            return self._timing.backward_ms(group)
        return self._timing.turn_ms(former)
