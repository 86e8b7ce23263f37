"""Moves slots between device and arena, and lets go of device memory when that is safe.

A source on the device is held until its copy out has ended. At every boundary that is asked of the device. The host
usually runs far ahead of the device, so the answer is mostly no, and memory would be held too long. Therefore a source
is also dropped
- at the boundary where, by learned durations, its copy should have ended;
- when more is under way than a cap allows (bytes, or copies of one module).
In both cases the compute stream is first made to wait for the copy. So a wrong guess costs time, and never data.

The effect: memory goes at the same points of every step, whatever the host's speed.

When a copy back starts is decided by `prefetch`, or by the backward that needs it (`engine`).
"""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from math import inf

import torch
from torch import Tensor

from nemo_rl_offload.offload.arena import HostArena
from nemo_rl_offload.offload.backends.base import Backend, Block, Event
from nemo_rl_offload.offload.overlap import bound_bytes
from nemo_rl_offload.offload.schedule import MARGIN
from nemo_rl_offload.offload.selection import Selection
from nemo_rl_offload.offload.slots import (
    COPYING_IN,
    COPYING_OUT,
    HOST,
    RESIDENT,
    Arrival,
    CopiesOut,
    ForwardPass,
    Group,
    Slot,
    SlotRef,
)
from nemo_rl_offload.offload.stats import ModuleStats, OffloadStats
from nemo_rl_offload.offload.timing import Timing


class Copies:
    """Not thread-safe: the engine's lock is held around every call."""

    def __init__(
        self,
        backend: Backend,
        arena: HostArena,
        timing: Timing,
        selection: Selection,
        stats: OffloadStats,
        empty: Tensor,
        *,
        max_inflight_bytes: int | None,
        max_inflight_groups: int | None,
    ) -> None:
        self._backend, self._arena, self._timing = backend, arena, timing
        self._selection, self._stats, self._empty = selection, stats, empty
        self._max_inflight_bytes = max_inflight_bytes
        self._max_inflight_groups = max_inflight_groups
        self._inflight: deque[CopiesOut] = deque()
        self._starting: list[torch.UntypedStorage | Tensor] = []
        """What is read or written by copies that nobody else knows yet. An interrupt leaves it here, so that no other
        tensor gets the memory before `rebuild`, which comes behind a synchronization."""
        self._inflight_bytes = 0
        self._largest_bytes = 0  # of a commit's copies
        self._link_free_ms = 0.0
        self.now_ms = 0.0
        """Where the compute stream is at least, by learned durations."""
        self.unused_bytes = 0
        """Reloaded ahead of backward."""
        self.resident_bytes = 0
        """On the device, of slots that a group has committed."""
        self.resident_limit_bytes: int | None = None
        """In place of a bound on the bytes of copies under way: compute waits for those only above it."""
        self._peak_resident_bytes = 0

    def resident(self, num_bytes: int) -> None:
        """Count bytes that have come to the device."""
        self.resident_bytes += num_bytes
        if self.resident_bytes > self._peak_resident_bytes:
            self._peak_resident_bytes = self.resident_bytes

    @property
    def held_host_bytes(self) -> int:
        """Host memory that others hold for as long as they are there."""
        return self._arena.held_bytes

    @property
    def staying_bytes(self) -> int:
        """`resident_bytes` but for what is on its way out."""
        return self.resident_bytes - self._inflight_bytes

    def take_peak_resident_bytes(self) -> int:
        """The highest `resident_bytes` since the last call."""
        peak_bytes, self._peak_resident_bytes = self._peak_resident_bytes, self.resident_bytes
        return peak_bytes

    def offload(self, slots: Sequence[Slot], module: str) -> int:
        """Start the copies of a commit's resident slots, as far as the arena has room, and return their bytes."""
        capacity_bytes, reserve = self._arena.capacity_bytes, self._arena.reserve
        moving: list[Slot] = []
        refs: list[SlotRef] = []
        moves: list[tuple[torch.UntypedStorage, Block]] = []
        total_bytes = 0
        for slot in slots:
            source, block = slot.storage, reserve(slot.num_bytes)
            assert source is not None
            if block is None:
                self.module_stats(module).denied_bytes += slot.num_bytes
                continue
            moving.append(slot)
            refs.append(slot.ref)
            total_bytes += slot.num_bytes
            moves.append((source, block))
        if self._arena.capacity_bytes != capacity_bytes:
            self._timing.host_was_busy()
        if not moving:
            return 0
        self._starting = [source for source, _ in moves]
        event = self._backend.copy_out(moves)
        self._timing.copied(event, total_bytes, out=True)
        copy_ms = self._timing.copy_ms(total_bytes, out=True)
        expected_ms = inf
        if copy_ms is not None:
            expected_ms = self._link_free_ms = max(self._link_free_ms, self.now_ms) + copy_ms * MARGIN
        stats, empty = self.module_stats(module), self._empty
        for slot, (_, block) in zip(moving, moves, strict=True):
            block.last_event = event
            slot.ref.block, slot.stats = block, stats
            slot.storage = None  # from here on the block has the content
            slot.state = COPYING_OUT
            slot.take_storage_of(empty)
        self._inflight.append(CopiesOut(refs, moves, total_bytes, event, expected_ms, module))
        self._starting = []
        self._inflight_bytes += total_bytes
        if total_bytes > self._largest_bytes:
            self._largest_bytes = total_bytes
        stats.bytes_out += total_bytes
        return total_bytes

    def bound_bytes(self, given: int | None) -> int:
        """How much may be under way one way; `given` is a bound, or None."""
        return bound_bytes(given, self._largest_bytes)

    @property
    def own_bound_bytes(self) -> int | None:
        """The bound on copies out where none is given, neither of bytes nor of groups."""
        is_given = self._max_inflight_bytes is not None or self._max_inflight_groups is not None
        return None if is_given else self.bound_bytes(None)

    def room_for_reloads(self, given: int | None) -> int:
        """How many bytes may be brought back ahead of backward now; `given` as above."""
        room_bytes = self.bound_bytes(given) - self.unused_bytes
        if self.resident_limit_bytes is None:
            return room_bytes
        return min(room_bytes, self.resident_limit_bytes - self.resident_bytes)

    def reached(self, group: Group) -> None:
        """Backward is at `group`: bring back what is still on the host, and take all of it as used. Each tensor has an
        event of its own then, since compute waits for the first already."""
        group.pending_bytes = 0
        for slot in group.alive_slots():
            if slot.ref.block is not None:
                self.reload((slot,))
            if slot.ref.unused:
                self.used(slot)

    def reload_group(self, group: Group) -> None:
        """Bring back whatever of a group is on the host, ahead of backward: with one event, for the host's sake."""
        group.pending_bytes = 0
        self.reload([slot for slot in group.alive_slots() if slot.ref.block is not None])

    def reload(self, slots: Sequence[Slot]) -> None:
        """Bring offloaded slots back, or take sources back that were not let go yet."""
        loading: list[Slot] = []
        blocks: list[Block] = []
        for slot in slots:
            block = slot.ref.block
            assert block is not None
            if slot.state is COPYING_OUT and self._take_back(slot, block):
                continue
            if not slot.judged:
                self._judge(slot)
            loading.append(slot)
            blocks.append(block)
        if not loading:
            return
        destinations, event = self._backend.copy_in(blocks, self._starting)
        self._timing.copied(event, sum([block.num_bytes for block in blocks]), out=False)
        self._land(loading, blocks, destinations, event)
        self._starting = []

    def _land(self, slots: list[Slot], blocks: list[Block], destinations: list[Tensor], event: Event) -> None:
        """Put slots on the destinations that the copies behind `event` write."""
        arrival = Arrival(event)
        for slot, block, destination in zip(slots, blocks, destinations, strict=True):
            num_bytes = slot.num_bytes
            slot.ref.loading, slot.arrival = (destination, event), arrival
            block.last_event = event
            slot.take_storage_of(destination)
            slot.ref.block = None  # from here on the destination has the content
            self._arena.release(block)
            if slot.state is HOST:
                slot.ref.is_resident = True
                self.resident(num_bytes)
            slot.state, slot.ref.unused = COPYING_IN, True
            slot.stats.bytes_in += num_bytes
            self.unused_bytes += num_bytes

    def judge_pass(self, pass_: ForwardPass) -> None:
        """Look which copies of a pass freed their sources, before its backward does: it frees a tensor that the next
        module saved too, outside of every region, before it comes to the region that copied it."""
        for group in pass_.before(len(pass_.groups)):
            for slot in group.alive_slots():
                if slot.state is HOST and not slot.judged:
                    self._judge(slot)

    def arrive(self, slot: Slot) -> None:
        """Let the compute stream wait for the reload of a slot that it is about to read."""
        arrival = slot.arrival
        assert arrival is not None
        if not arrival.is_timed:
            arrival.is_timed = True
            self._timing.waits(arrival.event, out=False)
        self._backend.compute_wait(arrival.event)
        slot.state, slot.ref.loading = RESIDENT, None
        if slot.ref.unused:
            self.used(slot)

    def used(self, slot: Slot) -> None:
        """Backward has come to what an unused reload was for."""
        slot.ref.unused = False
        self.unused_bytes -= slot.num_bytes

    def shrink(self, storage: torch.UntypedStorage, slot: Slot) -> None:
        """Free the device memory of an offloaded slot by force: now, or when its copy has ended."""
        if slot.ref.block is not None:
            slot.released = True
            if slot.state is HOST:
                storage.resize_(0)

    def let_go(self) -> None:
        """Drop sources whose copy has ended; beyond a cap, or where it should have, the compute stream waits."""
        while self._inflight:
            oldest = self._inflight[0]
            if not self._backend.done(oldest.event):
                if not self._over_cap() and oldest.expected_ms > self.now_ms:
                    return
                self._timing.waits(oldest.event, out=True)
                self._backend.compute_wait(oldest.event)
            self._drop_oldest()

    def drain(self) -> None:
        """Let the compute stream wait for every copy out, and drop all sources."""
        while self._inflight:
            self._backend.compute_wait(self._inflight[0].event)
            self._drop_oldest()

    def release(self, dead_slot: SlotRef) -> None:
        """Clean up after a slot that died. Does nothing the second time."""
        if dead_slot.loading is not None:  # freed only behind the copy that is still writing it
            self._backend.compute_wait(dead_slot.loading[1])
            dead_slot.loading = None
        block, dead_slot.block = dead_slot.block, None
        if block is not None:
            self._arena.release(block)
        if dead_slot.unused:
            self.unused_bytes -= dead_slot.num_bytes
        if dead_slot.is_resident:
            self.resident_bytes -= dead_slot.num_bytes
        dead_slot.unused = dead_slot.is_resident = False

    def rebuild(self, slots: Iterable[Slot]) -> None:
        """Make everything here and in the arena fit `slots`, which are all that are alive, after a change that was not
        finished. No copy is under way any more. See `changes`."""
        for copies in self._inflight:
            for ref, (source, _) in zip(copies.slots, copies.moves, strict=True):
                slot = ref()
                if slot is not None and slot.released:
                    source.resize_(0)
        self._inflight, self._starting = deque(), []
        self._inflight_bytes = self.unused_bytes = self.resident_bytes = 0
        used = []
        for slot in slots:
            ref = slot.ref
            if slot.storage is not None:  # nothing was taken from the device
                ref.block = None
                slot.take_storage_of(self._empty.data.set_(slot.storage))
                slot.state = RESIDENT
            elif ref.block is not None:
                slot.take_storage_of(self._empty)
                slot.state, ref.is_resident = HOST, False
                used.append(ref.block)
            else:
                slot.state = RESIDENT
            slot.arrival, ref.loading, ref.unused = None, None, False
            if slot.owner is not None and slot.state is RESIDENT:
                ref.is_resident = True
                self.resident_bytes += slot.num_bytes
        self._arena.rebuild(used)

    def module_stats(self, module: str) -> ModuleStats:
        stats = self._stats.per_module.get(module)
        if stats is None:
            stats = self._stats.per_module[module] = ModuleStats()
        return stats

    def _judge(self, slot: Slot) -> None:
        """Learn whether a copy freed what it copied."""
        slot.judged = True
        if not slot.source_freed():
            self._stats.ineffective_bytes += slot.num_bytes
            if slot.state is HOST and (place := slot.place) is not None:
                self._selection.was_ineffective(place)

    def _take_back(self, slot: Slot, block: Block) -> bool:
        """End the offloading of a slot whose source was not let go yet, where nothing has written to that."""
        if slot.released or not slot.unwritten:
            return False
        copying = (each for copies in self._inflight for each in zip(copies.slots, copies.moves, strict=True))
        source = next((source for ref, (source, _) in copying if ref() is slot), None)
        if source is None:
            return False
        slot.take_storage_of(self._empty.data.set_(source))
        slot.state, slot.ref.block = RESIDENT, None
        self._arena.release(block)
        self._stats.returned_bytes += slot.num_bytes
        return True

    def _over_cap(self) -> bool:
        limit = self.resident_limit_bytes
        if limit is None and self._inflight_bytes > self.bound_bytes(self._max_inflight_bytes):
            return True
        if limit is not None and self.resident_bytes > limit:
            return True
        cap = self._max_inflight_groups
        return cap is not None and max(Counter([copies.module for copies in self._inflight]).values()) > cap

    def _drop_oldest(self) -> None:
        copies = self._inflight.popleft()
        self._inflight_bytes -= copies.num_bytes
        left_bytes = 0
        for ref, (source, _) in zip(copies.slots, copies.moves, strict=True):
            slot = ref()
            if slot is None:
                continue
            if slot.state is COPYING_OUT:
                slot.state, ref.is_resident = HOST, False
                left_bytes += slot.num_bytes
            if slot.released:
                source.resize_(0)
        self.resident_bytes -= left_bytes
