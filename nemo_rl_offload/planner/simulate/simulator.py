"""Runs a pipeline schedule on three lanes per stage: compute, copies out, copies in.

A pass starts when the stage has done the pass before and its input is there: the activations of the stage before, or
the gradients of the stage behind (on the last stage, its own forward). It takes its segments one after another, and in
backward in reverse order.
- Copies out: a segment's copy is queued when its forward ends. The lane takes one at a time. When more than
  `max_inflight_bytes` are queued or on their way, compute waits for the oldest.
- Copies in: the lane takes offloaded segments in the order in which backward wants them, across passes. Each starts as
  soon as its copy out has ended and at most `max_prefetch_bytes` have arrived or are arriving unused. Compute waits for
  the copy that it needs.

Time and memory are counted under two assumptions. The step's time is that of copies in which start as early as they
may. Its memory is that of copies in which start as late as they may without delaying anybody: that is what prefetching
by time does. Memory that was copied out is given back where the engine can do so: at the next end of an offloading
forward or start of such a backward, and no later than its copy in.

Limits: messages between stages take a constant time and no link; copies never slow compute down. With a memory budget
the engine has no bound of bytes and waits less for copies out than here.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from nemo_rl_offload.offload.overlap import bound_bytes
from nemo_rl_offload.offload.solver import Link
from nemo_rl_offload.planner.simulate.pipeline_schedule import PipelinePass, Schedule


@dataclass(frozen=True)
class Segment:
    """A part of a pass; bytes are those of one microbatch."""

    forward_ms: float
    backward_ms: float
    """Recomputation included."""
    kept_bytes: int = 0
    """Device memory from this segment's forward to the end of its backward."""
    offloaded_bytes: int = 0


Segments = Sequence[Sequence[Sequence[Segment]]]
"""By stage, by chunk, in forward order."""


type Visited = tuple[int, int, int]
"""A segment of one microbatch: chunk, number in the chunk, microbatch."""


@dataclass(frozen=True)
class Transfers:
    """What moves and how fast."""

    link: Link
    max_inflight_bytes: int | None = None
    """None: the engine's own bound, 1 GiB or two of a stage's largest copies where that is more."""
    max_prefetch_bytes: int | None = None
    """Likewise."""
    message_ms: float = 0.0
    """From the end of a pass to the start of the next stage's."""


@dataclass
class StageTimes:
    """What one stage did in a step."""

    waits_out_ms: list[list[float]]
    """Time that compute waited for copies out, by chunk and by the segment after which it waited."""
    waits_in_ms: list[list[float]]
    """The same for copies in, by the segment that was waited for."""
    peak_bytes: int = 0
    """Most device memory that saved activations took at a time."""
    peak_host_bytes: int = 0
    committed_ms: dict[Visited, float] = field(default_factory=dict)
    """When the forward of each segment that offloads had ended, in that order."""
    reached_ms: dict[Visited, float] = field(default_factory=dict)
    """When backward came to each of them, before it waited for the copy."""

    @property
    def exposed_ms(self) -> float:
        """All time that compute waited for copies."""
        return sum(map(sum, self.waits_out_ms)) + sum(map(sum, self.waits_in_ms))


@dataclass(frozen=True)
class Timeline:
    """A simulated step."""

    step_ms: float
    stages: list[StageTimes]
    microbatch_ends_ms: list[float]
    """When the first stage had done the last backward pass of each microbatch."""


def simulate(schedule: Schedule, segments: Segments, transfers: Transfers, with_memory: bool = True) -> Timeline:
    """Run a step. Times in milliseconds from its start; peaks are 0 without memory, which takes time to add up."""
    stages = [_Stage(passes, segments[rank], transfers) for rank, passes in enumerate(schedule)]
    num_stages = len(stages)
    last_chunk = len(segments[0]) - 1
    ends: dict[tuple[bool, int, int], float] = {}  # by direction, position in the model, microbatch
    progress = True
    while progress:
        progress = False
        for rank, stage in enumerate(stages):
            while stage.pending:
                each = stage.pending[0]
                position = each.chunk * num_stages + rank
                ready = _ready(each, position, last_chunk * num_stages + num_stages - 1, ends, transfers.message_ms)
                if ready is None:
                    break
                ends[each.forward, position, each.microbatch] = stage.run(stage.pending.popleft(), ready)
                progress = True
    assert not any(stage.pending for stage in stages), "the schedule waits for itself"
    if with_memory:
        for stage in stages:
            stage.count_memory()
    microbatches = sorted({each.microbatch for each in schedule[0]})
    done = [ends[False, 0, microbatch] for microbatch in microbatches]
    return Timeline(max(stage.now for stage in stages), [stage.times for stage in stages], done)


def _ready(
    each: PipelinePass, position: int, last: int, ends: dict[tuple[bool, int, int], float], message_ms: float
) -> float | None:
    if each.forward:
        if position == 0:
            return 0.0
        end = ends.get((True, position - 1, each.microbatch))
    elif position == last:
        return ends.get((True, position, each.microbatch))
    else:
        end = ends.get((False, position + 1, each.microbatch))
    return None if end is None else end + message_ms


@dataclass(slots=True)
class _CopyIn:
    key: Visited
    num_bytes: int
    start: float
    duration: float
    used: float
    """When compute begins to use it."""


@dataclass(slots=True)
class _Stage:
    passes: Sequence[PipelinePass]
    segments: Sequence[Sequence[Segment]]
    transfers: Transfers
    now: float = 0.0
    out_free: float = 0.0
    out_ends: dict[Visited, float] = field(default_factory=dict)
    inflight: deque[tuple[float, int, Visited]] = field(default_factory=deque)
    inflight_bytes: int = 0
    released: dict[Visited, float] = field(default_factory=dict)
    """When the device's memory of what was copied out could be given back."""
    copies_in: list[_CopyIn] = field(default_factory=list)
    reloaded_bytes: list[int] = field(default_factory=lambda: [0])
    """Running total of `copies_in`."""
    device: list[tuple[float, int]] = field(default_factory=list)
    """Changes of device memory by time."""
    host: list[tuple[float, int]] = field(default_factory=list)

    max_inflight_bytes: int = 0
    max_prefetch_bytes: int = 0
    pending: deque[PipelinePass] = field(init=False)
    times: StageTimes = field(init=False)

    def __post_init__(self) -> None:
        self.pending = deque(self.passes)
        largest = max(segment.offloaded_bytes for chunk in self.segments for segment in chunk)
        self.max_inflight_bytes = bound_bytes(self.transfers.max_inflight_bytes, largest)
        self.max_prefetch_bytes = bound_bytes(self.transfers.max_prefetch_bytes, largest)
        zeros = [[0.0] * len(chunk) for chunk in self.segments]
        self.times = StageTimes(zeros, [list(row) for row in zeros])

    def run(self, each: PipelinePass, ready: float) -> float:
        self.now = max(self.now, ready)
        segments = self.segments[each.chunk]
        numbers = range(len(segments))
        visit = self._forward if each.forward else self._backward
        for number in numbers if each.forward else reversed(numbers):
            visit(segments[number], (each.chunk, number, each.microbatch))
        return self.now

    def _forward(self, segment: Segment, key: Visited) -> None:
        num_bytes = segment.offloaded_bytes
        self.device.append((self.now, segment.kept_bytes + num_bytes))
        self.now += segment.forward_ms
        if not num_bytes:
            return
        self.times.committed_ms[key] = self.now
        start = max(self.out_free, self.now)
        self.out_free = start + num_bytes / self.transfers.link.out_bytes_per_ms
        self.out_ends[key] = self.out_free
        self.host.append((start, num_bytes))
        self.inflight.append((self.out_free, num_bytes, key))
        self.inflight_bytes += num_bytes
        self._release_ended()
        while self.inflight_bytes > self.max_inflight_bytes:
            end = self.inflight[0][0]
            self.times.waits_out_ms[key[0]][key[1]] += end - self.now
            self.now = end
            self._release_ended()

    def _backward(self, segment: Segment, key: Visited) -> None:
        num_bytes = segment.offloaded_bytes
        if num_bytes:
            self.times.reached_ms[key] = self.now
            self._release_ended()
            arrival = self._copy_in(key, num_bytes)
            if arrival > self.now:
                self.times.waits_in_ms[key[0]][key[1]] += arrival - self.now
                self.now = arrival
            self.copies_in[-1].used = self.now
        self.now += segment.backward_ms
        self.device.append((self.now, -segment.kept_bytes - num_bytes))

    def _release_ended(self) -> None:
        while self.inflight and self.inflight[0][0] <= self.now:
            _, num_bytes, key = self.inflight.popleft()
            self.inflight_bytes -= num_bytes
            self.released[key] = self.now

    def _copy_in(self, key: Visited, num_bytes: int) -> float:
        """Return when the next copy in ends. It may not start before enough of those before it are used."""
        start = self.out_ends[key]
        if self.copies_in:
            before = self.copies_in[-1]
            start = max(start, before.start + before.duration)
        total = self.reloaded_bytes[-1] + num_bytes
        # The first of the copies that, together with all after it, is within the cap.
        first = bisect_left(self.reloaded_bytes, total - self.max_prefetch_bytes)
        if (blocking := min(first, len(self.copies_in)) - 1) >= 0:
            start = max(start, self.copies_in[blocking].used)
        duration = num_bytes / self.transfers.link.in_bytes_per_ms
        self.copies_in.append(_CopyIn(key, num_bytes, start, duration, 0.0))
        self.reloaded_bytes.append(total)
        return start + duration

    def count_memory(self) -> None:
        """Find the peaks, with every copy in as late as it delays nobody."""
        latest = float("inf")
        for copy in reversed(self.copies_in):
            latest = min(copy.used, latest) - copy.duration
            latest = max(latest, copy.start)
            self.device.append((min(self.released.get(copy.key, latest), latest), -copy.num_bytes))
            self.device.append((latest, copy.num_bytes))
            self.host.append((latest + copy.duration, -copy.num_bytes))
        self.times.peak_bytes = _peak(self.device)
        self.times.peak_host_bytes = _peak(self.host)


def _peak(changes: list[tuple[float, int]]) -> int:
    """The highest running total; what is given back at a moment counts before what is taken then."""
    return max(accumulate((change for _, change in sorted(changes)), initial=0))
