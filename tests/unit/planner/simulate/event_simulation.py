"""A step by brute force: all lanes of all stages move through whole milliseconds, one at a time."""

from collections.abc import Sequence

from nemo_rl_offload.planner.simulate.pipeline_schedule import PipelinePass, Schedule
from nemo_rl_offload.planner.simulate.simulator import Segments, Transfers

Key = tuple[int, int, int]


class BruteStage:
    """One stage; `link` rates must make every copy take whole milliseconds."""

    def __init__(
        self, passes: Sequence[PipelinePass], segments: Sequence[Sequence[object]], transfers: Transfers
    ) -> None:
        self.transfers = transfers
        self.segments = segments
        self.work: list[tuple[PipelinePass, int]] = []
        for each in passes:
            numbers = range(len(segments[each.chunk]))
            self.work += [(each, number) for number in (numbers if each.forward else reversed(numbers))]
        self.reloads = [(e.chunk, n, e.microbatch) for e, n in self.work if not e.forward and self.bytes_of(e, n)]
        self.busy: tuple[PipelinePass, int, int] | None = None
        self.out_queue: list[Key] = []
        self.out_end: int | None = None
        self.in_current: tuple[Key, int] | None = None
        self.inflight = self.unused = 0
        self.copied: set[Key] = set()
        self.arrived: set[Key] = set()
        self.finished: dict[PipelinePass, int] = {}
        self.stalling: PipelinePass | None = None
        self.waited = 0

    def bytes_of(self, each: PipelinePass, number: int) -> int:
        return self.segments[each.chunk][number].offloaded_bytes  # type: ignore[attr-defined, no-any-return]

    def size(self, key: Key) -> int:
        return self.segments[key[0]][key[1]].offloaded_bytes  # type: ignore[attr-defined, no-any-return]

    def advance(self, now: int, ready: object) -> bool:
        """Do one thing that can be done now; False when there is none."""
        return self.copy_out(now) or self.copy_in(now) or self.compute(now, ready)

    def copy_out(self, now: int) -> bool:
        if self.out_end == now:
            key = self.out_queue.pop(0)
            self.inflight -= self.size(key)
            self.copied.add(key)
            self.out_end = None
            return True
        if self.out_end is None and self.out_queue:
            self.out_end = now + round(self.size(self.out_queue[0]) / self.transfers.link.out_bytes_per_ms)
            return True
        return False

    def copy_in(self, now: int) -> bool:
        if self.in_current is not None:
            if self.in_current[1] != now:
                return False
            self.arrived.add(self.in_current[0])
            self.in_current = None
            return True
        if not self.reloads or self.reloads[0] not in self.copied:
            return False
        size = self.size(self.reloads[0])
        if self.unused and self.unused + size > self.transfers.max_prefetch_bytes:
            return False
        self.unused += size
        self.in_current = (self.reloads.pop(0), now + round(size / self.transfers.link.in_bytes_per_ms))
        return True

    def compute(self, now: int, ready: object) -> bool:
        if self.busy is not None:
            each, number, end = self.busy
            if end != now:
                return False
            self.busy = None
            if each.forward and (size := self.bytes_of(each, number)):
                self.out_queue.append((each.chunk, number, each.microbatch))
                self.inflight += size
            self.stalling = each
            return True
        if self.inflight > self.transfers.max_inflight_bytes:
            return False
        if self.stalling is not None and (not self.work or self.work[0][0] != self.stalling):
            self.finished[self.stalling] = now
        self.stalling = None
        if not self.work:
            return False
        each, number = self.work[0]
        if not ready(each, now):  # type: ignore[operator]
            return False
        segment = self.segments[each.chunk][number]
        size = self.bytes_of(each, number)
        if not each.forward and size:
            if (each.chunk, number, each.microbatch) not in self.arrived:
                return False
            self.unused -= size
        self.work.pop(0)
        duration = segment.forward_ms if each.forward else segment.backward_ms  # type: ignore[attr-defined]
        self.busy = (each, number, now + round(duration))
        return True


def brute_force_step_ms(schedule: Schedule, segments: Segments, transfers: Transfers) -> int:
    """The time at which the last stage has done its last pass; all durations are whole and at least 1."""
    stages = [BruteStage(passes, segments[rank], transfers) for rank, passes in enumerate(schedule)]
    positions = len(stages) * len(segments[0])

    def is_ready(rank: int, each: PipelinePass, now: int) -> bool:
        position = each.chunk * len(stages) + rank
        if each.forward and position == 0:
            return True
        if not each.forward and position == positions - 1:
            return PipelinePass(True, each.chunk, each.microbatch) in stages[rank].finished
        before = position + (-1 if each.forward else 1)
        source = PipelinePass(each.forward, before // len(stages), each.microbatch)
        end = stages[before % len(stages)].finished.get(source)
        return end is not None and end + transfers.message_ms <= now

    now = 0
    while not all(len(stage.finished) == len(passes) for stage, passes in zip(stages, schedule, strict=True)):
        moving = True
        while moving:
            moving = False
            for rank, stage in enumerate(stages):
                while stage.advance(now, lambda each, at, rank=rank: is_ready(rank, each, at)):
                    moving = True
        now += 1
        assert now < 100_000, "the simulated pipeline stands still"
    return max(end for stage in stages for end in stage.finished.values())
