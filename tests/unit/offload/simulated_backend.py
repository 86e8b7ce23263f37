"""A device of three lanes with a virtual clock, which looks for races.

Compute, copies out and copies in are lanes; an operation knows, as a vector clock, which operations of the other lanes
are ordered before it. Two operations on the same host bytes, of which one writes, must be ordered: otherwise it is a
hazard, whether or not this run went wrong. Device memory is checked by being as late as possible: the compute lane is
torch on the CPU and runs at once, but a copy moves its bytes only when something has waited for it. A source freed or a
destination dropped before that is a hazard, and a destination read before that holds poison. So a missing wait gives a
hazard or a wrong tensor, and cannot pass by luck.

The clock counts milliseconds. `compute` takes time on the compute lane; copies take `num_bytes` over the bandwidth of
their direction. The host looks at events `host_ahead_ms` before the compute lane's present, as a host does that
enqueues faster than the device works.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef

from nemo_rl_offload.offload.backends.base import Block, Event, HostSlab, allocate_pageable

COMPUTE, OUT, IN = range(3)
POISON = 0xFF


@dataclass(eq=False, slots=True)
class Operation:
    """One copy, or a point of the compute lane; as an event, its end."""

    lane: int
    number: int
    clock: tuple[int, ...]  # per lane, the number of the last operation ordered before this one, itself included
    end_ms: float
    device: StorageWeakRef | None = None
    block: Block | None = None
    needs: list["Operation"] = field(default_factory=list)
    executed: bool = False


class Access(NamedTuple):
    start: int
    stop: int
    operation: Operation
    writes: bool


class SimulatedBackend:
    """See `Backend`. Bandwidths are bytes/ms, one for each direction; 50 GB/s is 50e6."""

    device = torch.device("cpu")

    def __init__(
        self, out_bytes_per_ms: float = 50e6, in_bytes_per_ms: float = 50e6, host_ahead_ms: float = 0.0
    ) -> None:
        self._bytes_per_ms = {OUT: out_bytes_per_ms, IN: in_bytes_per_ms}
        self._host_ahead_ms = host_ahead_ms
        self._synchronized_ms = 0.0
        self._clocks = [[0, 0, 0] for _ in range(3)]
        self._free_ms = [0.0, 0.0, 0.0]
        self._last: dict[int, Operation] = {}
        self._accesses: dict[HostSlab, list[Access]] = {}
        self.hazards: list[str] = []
        self.refuse_after_bytes: int | None = None
        self._allocated_bytes = 0

    @property
    def now_ms(self) -> float:
        """Where the compute lane is."""
        return self._free_ms[COMPUTE]

    def compute(self, ms: float) -> None:
        """The compute lane works for `ms`."""
        self._free_ms[COMPUTE] += ms

    def allocate_host(self, num_bytes: int) -> HostSlab:
        self._allocated_bytes += num_bytes
        if self.refuse_after_bytes is not None and self._allocated_bytes > self.refuse_after_bytes:
            raise MemoryError("no more host memory")
        return allocate_pageable(num_bytes)

    def copy_out(self, moves: Sequence[tuple[UntypedStorage, Block]]) -> Event:
        for source, block in moves:
            operation = self._enqueue(OUT, source, block, [_operation(fence) for fence in block.fences])
            self._access(operation, block, writes=True)
        return operation

    def copy_in(
        self, blocks: Sequence[Block], started: list[torch.UntypedStorage | Tensor]
    ) -> tuple[list[Tensor], Event]:
        destinations = [torch.full((block.num_bytes,), POISON, dtype=torch.uint8) for block in blocks]
        started += destinations
        for destination, block in zip(destinations, blocks, strict=True):
            needs = [] if block.last_event is None else [_operation(block.last_event)]
            operation = self._enqueue(IN, destination.untyped_storage(), block, needs)
            self._access(operation, block, writes=False)
        return destinations, operation

    def compute_wait(self, event: Event) -> None:
        operation = _operation(event)
        self._execute(operation)
        self._free_ms[COMPUTE] = max(self._free_ms[COMPUTE], operation.end_ms)
        self._join(COMPUTE, operation)

    def done(self, event: Event) -> bool:
        operation = _operation(event)
        if operation.end_ms > max(self.now_ms - self._host_ahead_ms, self._synchronized_ms):
            return False
        self._execute(operation)
        for lane in range(3):  # whatever the host enqueues from now on comes after
            self._join(lane, operation)
        return True

    def mark(self) -> Event | None:
        return self._operation_on(COMPUTE, self.now_ms)

    def elapsed_ms(self, start: Event, end: Event) -> float:
        return _operation(end).end_ms - _operation(start).end_ms

    def reset_peak(self) -> None:
        """Nothing counts."""

    def peak_bytes(self) -> int | None:
        return None

    def unused_bytes(self) -> int | None:
        return None

    def synchronize(self) -> None:
        for operation in list(self._last.values()):
            self.compute_wait(operation)
        self._synchronized_ms = self.now_ms

    def _enqueue(self, lane: int, device: UntypedStorage, block: Block, needs: list[Operation]) -> Operation:
        for each in needs:
            self._join(lane, each)
        self._join(lane, self._operation_on(COMPUTE, self.now_ms))
        start = max([self._free_ms[lane], self.now_ms, *(each.end_ms for each in needs)])
        self._free_ms[lane] = start + block.num_bytes / self._bytes_per_ms[lane]
        operation = self._operation_on(lane, self._free_ms[lane])
        operation.device = StorageWeakRef(device)  # type: ignore[no-untyped-call]
        operation.block = block
        operation.needs = [*needs, *([self._last[lane]] if lane in self._last else [])]
        self._last[lane] = operation
        return operation

    def _operation_on(self, lane: int, end_ms: float) -> Operation:
        self._clocks[lane][lane] += 1
        return Operation(lane, self._clocks[lane][lane], tuple(self._clocks[lane]), end_ms)

    def _join(self, lane: int, operation: Operation) -> None:
        self._clocks[lane] = [max(pair) for pair in zip(self._clocks[lane], operation.clock, strict=True)]

    def _execute(self, operation: Operation) -> None:
        """Move the bytes of a copy, and of those ordered before it that have not moved theirs yet."""
        pending = [operation]
        while pending:
            current = pending[-1]
            waiting = [each for each in current.needs if not each.executed]
            if waiting:
                pending.extend(waiting)
                continue
            pending.pop()
            if not current.executed:
                self._move(current)
                current.executed, current.needs = True, []

    def _move(self, operation: Operation) -> None:
        if operation.device is None or operation.block is None:
            return
        storage = torch.UntypedStorage._new_with_weak_ptr(operation.device.cdata)
        what = ("a source", "a copy out") if operation.lane == OUT else ("a destination", "a copy in")
        if storage is None or storage.nbytes() < operation.block.num_bytes:
            self.hazards.append(f"{what[0]} was freed before {what[1]} had ended")
            return
        device = torch.empty(0, dtype=torch.uint8).set_(storage)
        for host, part in operation.block.views(device):
            if operation.lane == OUT:
                host.copy_(part)
            else:
                part.copy_(host)

    def _access(self, operation: Operation, block: Block, writes: bool) -> None:
        for slab, start, stop in _ranges(block):
            kept = []
            for access in self._accesses.setdefault(slab, []):
                before = access.operation.number <= operation.clock[access.operation.lane]
                overlaps = access.start < stop and start < access.stop
                if overlaps and (writes or access.writes) and not before:
                    self.hazards.append("two copies use the same host bytes in no certain order")
                if not (writes and before and start <= access.start and access.stop <= stop):
                    kept.append(access)
            self._accesses[slab] = [*kept, Access(start, stop, operation, writes)]


def _ranges(block: Block) -> Iterator[tuple[HostSlab, int, int]]:
    for slab, _, offset, num_bytes in block.pieces:
        yield slab, offset, offset + num_bytes


def _operation(event: Event | None) -> Operation:
    assert isinstance(event, Operation)
    return event
