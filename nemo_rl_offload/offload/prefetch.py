"""Brings back what backward will want next, at the last boundary that is early enough.

A reload can only be issued at a boundary (a commit, or backward's arrival at a group). `schedule` says when each has to
start at the latest; here a plan of these starts is kept over many boundaries, moved by how late backward is, and made
anew when the order changes or the plan no longer looks far enough (`HORIZON` groups).
"""

import weakref
from collections import deque
from itertools import islice

from nemo_rl_offload.offload.backward_order import BackwardOrder
from nemo_rl_offload.offload.copies import Copies
from nemo_rl_offload.offload.schedule import MARGIN, Need, latest_starts_ms
from nemo_rl_offload.offload.slots import Group, Phase
from nemo_rl_offload.offload.timing import Timing

LATENCY_MS = 0.03  # a copy is taken for starting this late
HORIZON = 40  # groups looked at, at least: a large one may have to start layers of small ones before its turn;
LASTS = 16  # and as many more, so that a plan lasts while backward reaches these


class Prefetch:
    """Not thread-safe: the engine's lock is held around every call."""

    def __init__(self, order: BackwardOrder, timing: Timing, copies: Copies, max_bytes: int | None) -> None:
        self._order, self._timing, self._copies = order, timing, copies
        self._max_bytes = max_bytes
        self._now_ms = self._reached_ms = 0.0  # by usual durations; and when backward was at the group reached last
        self._before: tuple[Group, bool, Phase] | None = None  # the last boundary
        # The plan in force: the version of the order it was made for; the groups that backward will reach and when,
        # soonest first; how many of these must be left for the plan to look far enough; when each reload has to start,
        # in the same order; and how far backward is behind the plan.
        self._version = -1
        self._upcoming: deque[tuple[weakref.ref[Group], float]] = deque()
        self._least_upcoming = 0
        self._starts: deque[tuple[float, weakref.ref[Group]]] = deque()
        self._late_ms = 0.0

    def boundary(self, group: Group, forward: bool) -> None:
        """A commit of `group`, or backward's arrival there: both clocks go on.

        This clock goes on by the usual interval, so that reloads are not late; that of the copies by the shortest seen,
        so that no copy is taken for done too early.
        """
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
        first_due_ms = next_boundary_ms if forward and self._order.first_backward_follows(group) else None
        if not self._follows_plan(group, forward) or first_due_ms is not None:
            self._plan(former, first_due_ms)
        self._start_before(self._now_ms + next_boundary_ms)

    def _follows_plan(self, group: Group, forward: bool) -> bool:
        """Whether the plan made last still tells what comes next, far enough."""
        if not forward:
            reached, due_ms = self._upcoming.popleft() if self._upcoming else (None, 0.0)
            if reached is None or reached() is not group:
                return False
            self._late_ms = self._reached_ms - due_ms
        return self._version == self._order.version and len(self._upcoming) >= self._least_upcoming

    def _plan(self, former: Group, first_due_ms: float | None) -> None:
        """When each of the reloads to come has to start. `first_due_ms` is in how many ms backward comes, where that is
        known better than by the time since the last one."""
        needs: list[Need] = []
        refs: list[weakref.ref[Group]] = []
        self._version = self._order.version
        self._upcoming.clear()
        due_ms, self._late_ms = self._reached_ms, 0.0
        for following in islice(self._order.upcoming(former), HORIZON + LASTS):
            due_ms = (
                due_ms + self._interval_ms(former, following) if first_due_ms is None else self._now_ms + first_due_ms
            )
            former, first_due_ms = following, None
            ref = weakref.ref(following)
            self._upcoming.append((ref, due_ms))
            if num_bytes := following.pending_bytes:
                copy_ms = self._timing.copy_ms(num_bytes, out=False)
                needs.append(Need(due_ms, float("inf") if copy_ms is None else copy_ms * MARGIN + LATENCY_MS))
                refs.append(ref)
        self._least_upcoming = HORIZON if len(self._upcoming) == HORIZON + LASTS else 0
        self._starts = deque(zip(latest_starts_ms(needs), refs, strict=True))

    def _start_before(self, until_ms: float) -> None:
        """Start the reloads that have to start before then, as far as the byte cap allows."""
        room = None
        while self._starts and self._starts[0][0] + self._late_ms < until_ms:
            group = self._starts[0][1]()
            if group is not None and group.pending_bytes:
                if room is None:
                    room = self._copies.room_for_reloads(self._max_bytes)
                room -= group.pending_bytes
                if room < 0:
                    return
                self._copies.reload_group(group)
            self._starts.popleft()

    def _as_many_as_fit(self, group: Group) -> None:
        """Nothing is known: reload what comes next, within the cap; where the last such call stopped, go on."""
        pass_ = group.pass_
        for following in pass_.before(min(group.index, pass_.loaded_to)):
            if following.pending_bytes > self._copies.room_for_reloads(self._max_bytes):
                return
            self._copies.reload_group(following)
            pass_.loaded_to = following.index

    def _interval_ms(self, former: Group, group: Group) -> float:
        if former.pass_ is group.pass_:
            return self._timing.backward_ms(group)
        return self._timing.turn_ms(former)
