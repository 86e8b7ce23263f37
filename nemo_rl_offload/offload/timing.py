"""What the device's clock says: how long groups compute, how fast the link is, how long compute waited.

Events are put on the streams as the step goes, and read when the step is over and the device has passed them all. So
nothing here waits.

What is learned, and why so:
- Durations between boundaries are kept per byte that the group saves: lengths change from step to step.
- Time in which compute waited for copies is taken out. Else a late reload would look like slow compute, and be issued
  late for ever.
- So is time in which the host pins memory, in the first steps: a third of a second a gibibyte, in which the link seemed
  ten times slower than it is.
- Averages are exponential. Beside them stands the shortest of the latest observations, for the one question where
  being early costs time: whether a copy has ended.

Limit: a device without a clock (see `Backend.mark`) teaches nothing, and every rate stays unknown.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from nemo_rl_offload.offload.backends.base import Backend, Event
from nemo_rl_offload.offload.slots import Group, Key, Phase
from nemo_rl_offload.offload.stats import OffloadStats

NEWEST = 0.5  # weight of the newest observation in an average
NUM_LATEST = 32  # observations of which the shortest counts
MAX_PENDING_STEPS = 4
MAX_BOUNDARIES = 100_000


class Boundary(NamedTuple):
    """A commit, or a backward that reached a group. `phase` is the `BackwardOrder`'s."""

    event: Event
    forward: bool
    group: Group
    phase: Phase


class Wait(NamedTuple):
    """The compute stream, arriving at `since`, waited for the copy that ends at `until`. `out` is its direction; None:
    it waited for the host."""

    since: Event
    until: Event
    out: bool | None


class Copy(NamedTuple):
    since: Event
    end: Event
    num_bytes: int
    out: bool


@dataclass(slots=True)
class Step:
    """One step's events, in the order in which they were given to the device."""

    boundaries: list[Boundary] = field(default_factory=list)
    waits: list[tuple[int, Wait]] = field(default_factory=list)  # with the number of boundaries before it
    copies: list[Copy] = field(default_factory=list)
    end: Event | None = None  # where the compute stream was when the step was over
    unused_bytes: int | None = None  # see `Backend.unused_bytes`


@dataclass(slots=True)
class GroupTimes:
    """A group in a step that has been read: ms since the step's first boundary, and since the boundary before each,
    without the waits. `reached_ms` is not a number when no backward came."""

    group: Group
    committed_ms: float
    forward_ms: float
    reached_ms: float = float("nan")
    backward_ms: float = 0.0


class Rates[K](dict[K, float]):
    """Exponential averages by key. Of two observations the second counts: kernels are compiled and chosen in the first,
    which can take a thousand times as long."""

    def __init__(self) -> None:
        self._once: set[K] = set()

    def add(self, key: K, value: float) -> None:
        if key not in self:
            self._once.add(key)
            self[key] = value
        elif key in self._once:
            self._once.remove(key)
            self[key] = value
        else:
            self[key] += NEWEST * (value - self[key])


class Shortest[K](dict[K, float]):
    """The shortest of the latest observations, by key."""

    def __init__(self) -> None:
        self._latest: dict[K, deque[float]] = {}

    def add(self, key: K, value: float) -> None:
        latest = self._latest.setdefault(key, deque(maxlen=NUM_LATEST))
        latest.append(value)
        self[key] = min(latest)


class Timing:
    """Records a step's events and learns from those that have passed.

    `on_step` receives the groups of each step read, in the order of their commits, all its boundaries in ms, and what
    nobody had needed of the device's memory when it was over (see `Backend.unused_bytes`).
    """

    def __init__(
        self,
        backend: Backend,
        stats: OffloadStats,
        on_step: Callable[[list[GroupTimes], list[float], int | None], None],
    ) -> None:
        self._backend = backend
        self._stats = stats
        self._on_step = on_step
        self._step = Step()
        self._pending: deque[Step] = deque()
        self._mark: Event | None = None
        self.has_clock = False
        """Whether the device can be timed at all; known from the first boundary on."""
        self._latest: Boundary | None = None  # of those read
        self._latest_reached: Boundary | None = None
        self._forward, self._backward = Rates[Key](), Rates[Key]()  # ms per byte
        # ms per byte, by the pipeline's phase; None stands for any.
        self._after = Rates[tuple[Key, bool, Phase | None]]()
        self._shortest = Shortest[tuple[Key, bool, bool]]()  # ms per byte; by both boundaries' directions
        # ms from a pass to the next, by its first key and the phase in which it began; None stands for any.
        self._turn = Rates[tuple[Key, Phase | None]]()
        self._link = Rates[bool]()  # ms per byte; True is out

    def boundary(self, group: Group, forward: bool, phase: Phase) -> None:
        """The compute stream is at a boundary; copies recorded until the next one start here at the earliest."""
        self._mark = self._backend.mark()
        self.has_clock = self._mark is not None
        if self._mark is not None and len(self._step.boundaries) < MAX_BOUNDARIES:
            self._step.boundaries.append(Boundary(self._mark, forward, group, phase))

    def copied(self, end: Event, num_bytes: int, out: bool) -> None:
        if self._mark is not None and len(self._step.copies) < MAX_BOUNDARIES:
            self._step.copies.append(Copy(self._mark, end, num_bytes, out))

    def waits(self, until: Event, out: bool) -> None:
        """Call before the compute stream is made to wait for `until`."""
        since = self._backend.mark()
        if since is not None and len(self._step.waits) < MAX_BOUNDARIES:
            self._step.waits.append((len(self._step.boundaries), Wait(since, until, out)))

    def host_was_busy(self) -> None:
        """Since the last boundary, without giving the device any work: what it waited is neither compute nor copy."""
        since, self._mark = self._mark, self._backend.mark()
        if since is not None and self._mark is not None and len(self._step.waits) < MAX_BOUNDARIES:
            self._step.waits.append((len(self._step.boundaries), Wait(since, self._mark, None)))

    def end_step(self) -> None:
        """No graph is alive, or the caller says so: what was recorded is one step."""
        if self._step.boundaries:
            self._step.end, self._step.unused_bytes = self._backend.mark(), self._backend.unused_bytes()
            self._pending.append(self._step)
            self._step = Step()
            if len(self._pending) > MAX_PENDING_STEPS:
                self._pending.popleft()
                self._latest = self._latest_reached = None
        self.read()

    def forget_steps(self) -> None:
        """Drop what was recorded and not read: a step that was cut off. What was learned stays."""
        self._step = Step()
        self._pending = deque()
        self._mark = self._latest = self._latest_reached = None

    def read(self) -> None:
        """Learn from the steps that are over and that the device has passed."""
        while self._pending and self._passed(self._pending[0]):
            self._read(self._pending.popleft())

    def forward_ms(self, group: Group) -> float:
        """From the boundary before to the commit of such a group; 0 when unknown."""
        return self._forward.get(group.key, 0.0) * group.saved_bytes

    def backward_ms(self, group: Group) -> float:
        """From the group reached before, in the same pass, to such a group; 0 when unknown."""
        return self._backward.get(group.key, 0.0) * group.saved_bytes

    def turn_ms(self, last: Group) -> float:
        """From a group like `last`, the last of its pass in backward, to the first of the next pass; 0 when unknown."""
        key, phase = last.pass_.first_key, last.pass_.phase
        return self._turn.get((key, phase), self._turn.get((key, None), 0.0))

    def after_ms(self, group: Group, forward: bool, phase: Phase) -> float | None:
        """From such a group's commit, or from backward's arrival there, to the next boundary; None when unknown."""
        rate = self._after.get((group.key, forward, phase), self._after.get((group.key, forward, None)))
        return None if rate is None else rate * group.saved_bytes

    def at_least_ms(self, group: Group, forward: bool, next_forward: bool) -> float:
        """The same to a boundary of which this is known: the shortest of the latest such intervals; 0 when unknown.

        A pipeline waits between some forwards and their backward, and not between others; and a layer takes longer
        where the host is late. By an average, copies seem to have ended that have not."""
        return self._shortest.get((group.key, forward, next_forward), 0.0) * group.saved_bytes

    def copy_ms(self, num_bytes: int, out: bool) -> float | None:
        """How long the link takes, by what it has shown; None before that."""
        rate = self._link.get(out)
        return None if rate is None else rate * num_bytes

    def _passed(self, step: Step) -> bool:
        """Whether the device has passed every event of it: the last of each kind, which may be of several streams."""
        copies = [next((copy.end for copy in reversed(step.copies) if copy.out == out), None) for out in (True, False)]
        waits = [event for _, wait in step.waits[-1:] for event in (wait.since, wait.until)]
        last = (step.end, step.boundaries[-1].event, *waits, *copies)
        return all(self._backend.done(event) for event in last if event is not None)

    def _read(self, step: Step) -> None:
        """Intervals reach back into the step read before, since a step may be as short as one microbatch."""
        self._read_copies(step.copies)
        start = step.boundaries[0].event
        elapsed = [self._backend.elapsed_ms(start, boundary.event) for boundary in step.boundaries]
        total = 0.0
        for position, ms in enumerate(self._read_waits(step.waits, len(step.boundaries))):
            total += ms
            elapsed[position] -= total
        groups: dict[Group, GroupTimes] = {}
        before = self._before(start, self._latest)
        last_reached = self._before(start, self._latest_reached)
        for boundary, at in zip(step.boundaries, elapsed, strict=True):
            group = boundary.group
            interval = 0.0
            if before is not None:
                interval = at - before[1]
                former = before[0]
                rate, key = interval / max(1, former.group.saved_bytes), former.group.key
                for phase in (former.phase, None):
                    self._after.add((key, former.forward, phase), rate)
                self._shortest.add((key, former.forward, boundary.forward), rate)
            before = boundary, at
            if boundary.forward:
                self._forward.add(group.key, interval / max(1, group.saved_bytes))
                groups[group] = GroupTimes(group, at, interval)
                continue
            if last_reached is not None and last_reached[0].group.pass_ is group.pass_:
                self._backward.add(group.key, interval / max(1, group.saved_bytes))
            elif last_reached is not None:
                former_pass = last_reached[0].group.pass_
                for phase in {former_pass.phase, None}:
                    self._turn.add((former_pass.first_key, phase), at - last_reached[1])
            last_reached = boundary, at
            if group in groups:
                groups[group].reached_ms = at
                groups[group].backward_ms = interval
        self._latest = step.boundaries[-1]
        self._latest_reached = None if last_reached is None else last_reached[0]
        self._on_step(list(groups.values()), sorted(elapsed), step.unused_bytes)

    def _before(self, start: Event, boundary: Boundary | None) -> tuple[Boundary, float] | None:
        """A boundary of an earlier step, and its time as seen from this one's start."""
        return None if boundary is None else (boundary, self._backend.elapsed_ms(start, boundary.event))

    def _read_copies(self, copies: Iterable[Copy]) -> None:
        """A copy started at its boundary, or when the link had finished the copy before it."""
        busy_ms, num_bytes = {True: 0.0, False: 0.0}, {True: 0, False: 0}
        last_end: dict[bool, Event] = {}
        for copy in copies:
            taken = self._backend.elapsed_ms(copy.since, copy.end)
            if copy.out in last_end:
                taken = min(taken, self._backend.elapsed_ms(last_end[copy.out], copy.end))
            last_end[copy.out] = copy.end
            busy_ms[copy.out] += taken
            num_bytes[copy.out] += copy.num_bytes
        for out in (True, False):
            self._stats.copy_ms += busy_ms[out]
            if num_bytes[out]:
                self._link.add(out, busy_ms[out] / num_bytes[out])

    def _read_waits(self, waits: list[tuple[int, Wait]], num_boundaries: int) -> list[float]:
        """Milliseconds waited between each boundary and the one before it."""
        lost = [0.0] * num_boundaries
        for position, wait in waits:
            ms = max(0.0, self._backend.elapsed_ms(wait.since, wait.until))
            if wait.out:
                self._stats.stall_out_ms += ms
            elif wait.out is not None:
                self._stats.stall_in_ms += ms
            if position < num_boundaries:
                lost[position] += ms
        return lost
