"""Keep a forward pass's large saved tensors in host memory until just before their backward needs them.

Mechanism. While a region is open, autograd hands every tensor it saves to `pack`, which answers with a
handle. A handle names a slot; a slot is one storage, however many views of it are saved and by however many
regions. `commit` copies the slots that the region saved to the arena (`copies`), and puts a hook on the node that
made the region's output: backward arrives there first. Commits and these arrivals are the boundaries at which the
engine acts: it lets go of device memory whose copy has ended, and brings back what backward will want next
(`backward_order` says which groups, `schedule` when, `timing` how long things take). `unpack` needs only the handle, so
nothing here counts microbatches or expects an order: any number of graphs, backward in any order, twice, or never.

A slot:  RESIDENT - commit -> COPYING_OUT - copied -> HOST - reload -> COPYING_IN - unpack -> RESIDENT
It is gone, with its block, when the last handle is: the graph owns handles, handles own slots, and everything
else here refers to slots weakly. Backward frees each node's tensors as it goes, as without offloading.

Five things that are easy to get wrong:
- `pack` keeps `t.detach()`, never `t`. A tensor saved by the node that made it (exp, attention) has that node
  as its `grad_fn`; a handle that held it would close a cycle through C++, invisible to the garbage collector.
- A storage's address is used again after it is freed, so an address alone names nothing. A slot holds a weak
  reference to its storage, which keeps the address taken while the memory goes; it also tells whether the
  memory did go.
- A storage written in place after its copy is different content for whoever saves it next. A slot keeps a
  *witness* of each tensor it copied, which has lost its bytes but shares the original's version counter, and is
  shared only while no witness has moved. A tensor changed after it was saved is an error when backward wants it,
  as in plain autograd, also when the copy was taken in time: on a device, nobody could tell.
- Finalizers run anywhere, inside this module too. They take no lock and call nothing: they append to a deque.
- An interrupt may come between any two instructions. `changes` says what is done about it.
- A region that opens inside a backward belongs to a recomputation, whose own backward follows at once: its tensors
  stay. They still pass through `pack`, because checkpointing without reentry counts those that do not.

Rejected: an identity autograd node around the region, the usual carrier of the reload. At the start it
changes the order in which gradients are summed (differences of 1e-8); at the end it makes the output a view,
which pipeline code that frees outputs refuses. A hook on the node that is already there changes nothing.

Limit: one device and one compute stream per engine. Whole storages move: a small view of a large storage
moves it all.
"""

import copy
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import count
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from nemo_rl_offload.offload.arena import HostArena
from nemo_rl_offload.offload.backends.base import Backend
from nemo_rl_offload.offload.backward_order import BackwardOrder
from nemo_rl_offload.offload.changes import Changes
from nemo_rl_offload.offload.copies import Copies
from nemo_rl_offload.offload.exclusions import Exclusions
from nemo_rl_offload.offload.memory_budget import MemoryBudgetController
from nemo_rl_offload.offload.prefetch import Prefetch
from nemo_rl_offload.offload.saved_hooks import HookedRegion, Hooks, remove_left_hooks
from nemo_rl_offload.offload.selection import Selection
from nemo_rl_offload.offload.slots import (
    COPYING_IN,
    RESIDENT,
    Group,
    Handle,
    Kept,
    Slot,
    SlotRef,
    deref,
    set_storage,
    unchanged,
)
from nemo_rl_offload.offload.stats import OffloadStats
from nemo_rl_offload.offload.timing import GroupTimes, Timing

_current_graph_task_id = torch._C._current_graph_task_id

T = TypeVar("T", bound=Tensor | Sequence[Tensor | None])


class Region(HookedRegion):
    """One occurrence of `module` in `layer`. A context manager: tensors saved inside go to the engine. It can
    be entered again until it is committed, and other regions can open, close and be committed in between."""

    __slots__ = ("_engine", "_slots", "layer", "module")

    def __init__(self, engine: "OffloadEngine", module: str, layer: int | str) -> None:
        super().__init__()
        self.module = module
        self.layer = layer
        self._engine = engine
        self._slots: list[SlotRef] = []

    def hooks(self) -> Hooks:
        return self._engine._pack_hook(self), self._engine._unpack

    def forget(self) -> None:
        self._slots.clear()

    def _pack(self, tensor: Tensor) -> Handle | Kept:
        engine = self._engine
        if not self.open.locked():
            remove_left_hooks()
            return self._keep(tensor)
        if type(tensor) is not Tensor or tensor.is_nested or tensor.device != engine.device:
            if type(tensor) not in (Tensor, Parameter) or tensor.is_nested:
                engine.kept_types[self.module] = "nested tensor" if tensor.is_nested else type(tensor).__name__
            return self._keep(tensor)
        with engine._changes.lock:
            assert not engine._closed, "the offload engine is closed"
            try:
                storage = tensor.untyped_storage()
            except NotImplementedError:  # sparse, for one
                return self._keep(tensor)
            key, num_bytes = storage._cdata, storage.nbytes()
            if num_bytes == 0 or engine._exclusions.covers(tensor, key):
                return self._keep(tensor)
            ref = engine._slots.get(key)
            slot = None if ref is None else ref()
            detached, version = tensor.detach(), tensor._version
            forward = getattr(engine._forward, "number", 0)
            if slot is not None and slot.ref.block is not None and not engine._goes_on(slot, forward, self):
                # Alive since an earlier forward, it is kept by others: a copy would free nothing, and the one that is
                # there may be of something else. A buffer that is filled through `.data` has no version that tells.
                return self._keep(tensor)
            if slot is None or not slot.holds_content_of(tensor):
                slot = Slot(storage, key, num_bytes, engine._dead_slots.append, detached, version)
                slot.forward = forward
                engine._alive[id(slot.ref)] = slot.ref
                engine._slots[key] = slot.ref
            else:
                if slot.storage is None:
                    set_storage(detached, engine._empty)
                slot.more += (detached,)
                slot.versions += version
            if not slot.wanted:
                slot.wanted = tensor.nbytes >= engine._min_tensor_bytes and (
                    not engine._min_tensor_elements or tensor.numel() >= engine._min_tensor_elements
                )
            self._slots.append(slot.ref)
            return slot, detached, version, self

    def _keep(self, tensor: Tensor) -> Kept:
        return tensor if isinstance(tensor, Parameter) else tensor.detach(), tensor._version, self

    def _keep_recomputed(self, tensor: Tensor) -> Kept:
        if not self.open.locked():
            remove_left_hooks()
        return self._keep(tensor)

    def __str__(self) -> str:
        return f"{self.module} of layer {self.layer}"


class OffloadEngine:
    """Offloads the saved tensors of one model on one device. See the module's text for how.

    Args:
        backend: the device; tensors on other devices are left alone.
        host_memory_budget_bytes: the most host memory taken; what does not fit stays on the device.
        arena: that memory, where others of `backend` use it too; its owner closes it. None: one of the engine's own.
        min_tensor_bytes: a tensor below it is not worth a copy. A smaller view of a storage that is offloaded anyway
            goes with it.
        min_tensor_elements: the same as a number of elements; a tensor is moved where it reaches both.
        max_inflight_bytes: device memory that copies out may hold before the compute stream waits for them. None:
            1 GiB, or two of the largest groups where that is more; and what it would wait for too long stays.
        max_inflight_groups: commits of one module whose copies may be under way; None for any number.
        max_prefetch_bytes: device memory for groups reloaded ahead of the one that backward has reached; None likewise.
        selection: what stays on the device although it is saved in a region.
        auto: chooses, from measurements, what else stays; None leaves nothing else.
        steps_are_told: `end_step` will be called after each step. Else, until that happens for the first time, a step
            is over when no graph is alive, as after each microbatch that is alone.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        host_memory_budget_bytes: int,
        arena: HostArena | None = None,
        min_tensor_bytes: int = 1 << 20,
        min_tensor_elements: int = 0,
        max_inflight_bytes: int | None = None,
        max_inflight_groups: int | None = None,
        max_prefetch_bytes: int | None = None,
        selection: Selection | None = None,
        auto: MemoryBudgetController | None = None,
        steps_are_told: bool = False,
    ) -> None:
        self._backend, self.device = backend, backend.device
        self._min_tensor_bytes = min_tensor_bytes
        self._min_tensor_elements = min_tensor_elements
        # Backward runs in autograd's threads, one per device and the caller's: nodes on the CPU and on the
        # device may unpack at the same moment. Nothing called under its lock enters the engine again.
        self._changes = Changes(self._recover)
        self._slots: dict[int, SlotRef] = {}  # by storage address: the newest slot of that storage
        self._alive: dict[int, SlotRef] = {}  # of all slots, by id
        self._dead_slots: deque[SlotRef] = deque()
        self._exclusions = Exclusions()
        self._empty = torch.empty(0, dtype=torch.uint8, device=backend.device)
        self._stats = OffloadStats()
        self._owns_arena = arena is None
        self._arena = HostArena(backend, host_memory_budget_bytes) if arena is None else arena
        self._selection = selection or Selection()
        self._auto = auto
        self._timing = Timing(backend, self._stats, self._learn)
        self._copies = Copies(
            backend,
            self._arena,
            self._timing,
            self._selection,
            self._stats,
            self._empty,
            max_inflight_bytes=max_inflight_bytes,
            max_inflight_groups=max_inflight_groups,
        )
        self._order = BackwardOrder()
        self._forwards, self._forward = count(1), threading.local()
        self._max_prefetch_bytes = max_prefetch_bytes
        self._prefetch = Prefetch(self._order, self._timing, self._copies, max_prefetch_bytes)
        self._steps_are_told = steps_are_told
        self._closed = False
        self.kept_types: dict[str, str] = {}
        """By module: a subclass of tensors that it saved, which are never moved."""

    def region(self, module: str, layer: int | str) -> Region:
        """A region to enter around `module`'s computation, then to `commit`. Without grad it does nothing."""
        assert not self._closed, "the offload engine is closed"
        return Region(self, module, layer)

    def exclude(self, tensors: Iterable[Tensor]) -> None:
        """Never offload anything on these tensors' storages: parameters, and buffers that outlive a step. A
        tensor whose `.data` moves to another storage stays excluded; so do views of it."""
        with self._changes.lock, self._changes:
            assert not self._closed, "the offload engine is closed"
            self._exclusions.add(tensors)

    def commit(self, region: Region, output: T, release: Sequence[Tensor] = (), later: Sequence[Tensor] = ()) -> T:
        """Start copying out what `region` saved; `output` (a tensor, or a sequence whose first element is
        one), made by the region or after it, starts the reload when backward reaches it. Returns `output`
        itself.

        Storages of `release` that were offloaded are shrunk to nothing once their copy has ended, whoever
        else holds them. The caller guarantees that nobody reads them again except through plain tensors
        saved inside this engine's regions: a node outside of every region that saved one finds it empty.

        Storages of `later` are left to a following region that saves them too, and are counted as that one's:
        the copy would hold a tensor that the next module still reads. Where that one is no region, they stay.

        When `output` needs no gradient, no backward will come: everything stays as it is.
        """
        assert not region._entered, "commit a region after leaving it"
        first = output if isinstance(output, Tensor) else output[0]
        node = None if first is None else first.grad_fn
        refs, region._slots = region._slots, []
        if node is None:
            return output
        if self._auto is not None:
            self._auto.begin()
        if not refs:
            return output
        with self._changes.lock, self._changes:
            assert not self._closed, "the offload engine is closed"
            self._collect()
            slots, own, pending_bytes = self._take(region, refs, later)
            if not own and not pending_bytes:
                return output
            own_bytes = sum([slot.num_bytes for slot in own])
            group = Group((region.module, region.layer), [slot.ref for slot in slots], own_bytes)
            self._order.commit(group)
            for slot in own:
                slot.pass_ = group.pass_
            self._prefetch.boundary(group, forward=True)
            if self._auto is not None:
                self._copies.resident_limit_bytes = self._auto.visit(group, True, self._backend)
            group.pending_bytes = pending_bytes + self._offload(group, own)
            if group.pending_bytes:
                self._copies.module_stats(region.module).num_groups += 1
            for tensor in release:
                storage = tensor.untyped_storage()
                if (held := deref(self._slots.get(storage._cdata))) is not None:
                    self._copies.shrink(storage, held)
            self._copies.let_go()
            self._prefetch.ahead(group, forward=True)
        # The hook outlives backward wherever the user keeps the loss; a group refers to its slots weakly.
        node.register_prehook(partial(self._backward_reached, group))
        return output

    def begin_forward(self) -> None:
        """A forward begins in this thread, perhaps of another chunk of the model.

        Needed where chunks take turns, and where a forward may save a tensor of an earlier one whose graph is alive,
        with another content, of which no version counter tells.
        """
        remove_left_hooks()
        self._forward.number = next(self._forwards)
        with self._changes.lock, self._changes:
            self._order.end_pass()

    def end_step(self) -> None:
        """A step is over: read its times, and bring the figures up to date. Never needed for correctness."""
        with self._changes.lock, self._changes:
            assert not self._closed, "the offload engine is closed"
            self._collect()
            self._copies.let_go()
            self._exclusions.stale = True
            self._steps_are_told = True
            self._end_step()

    def stats(self) -> OffloadStats:
        """A copy of the totals since the engine was built. Times are those of steps that the device has passed: between
        steps and after it was synchronized, of all."""
        with self._changes.lock, self._changes:
            self._collect()
            if not self._slots:  # what a step goes by stays as it is until it is over
                self._timing.read()
            totals = copy.deepcopy(self._stats)
            for name in ("bytes_out", "bytes_in", "denied_bytes", "kept_bytes"):
                setattr(totals, name, sum(getattr(module, name) for module in totals.per_module.values()))
            totals.host_bytes = self._arena.used_bytes
            totals.peak_host_bytes = self._arena.peak_bytes
            totals.host_capacity_bytes = self._arena.capacity_bytes
            return totals

    def close(self) -> None:
        """Give the host memory back; once is enough. No use after it but `stats`, nor a pending backward."""
        with self._changes.lock, self._changes:
            self._closed = True
            self._copies.drain()
            if self._owns_arena:
                self._arena.close()

    def _pack_hook(self, region: Region) -> Callable[[Tensor], Handle | Kept]:
        if _current_graph_task_id() != -1:
            return region._keep_recomputed
        if self._dead_slots or self._exclusions.stale or self._changes.are_unfinished:
            with self._changes.lock, self._changes:
                self._collect()
                self._exclusions.refresh()
        return region._pack

    def _unpack(self, packed: Handle | Kept) -> Tensor:
        if len(packed) == 3:
            return unchanged(*packed)
        slot, saved, version, where = packed
        with self._changes.lock:
            unchanged(saved, version, where)
            if slot.state is RESIDENT and not self._changes.are_unfinished:
                return saved
            with self._changes:
                if slot.ref.block is not None:
                    assert not self._closed, "the offload engine was closed before the backward that needs it"
                    self._stats.demand_reloads += 1
                    self._copies.reload((slot,))
                if slot.state is COPYING_IN:
                    self._copies.arrive(slot)
            return saved

    def _backward_reached(self, group: Group, grad_outputs: object) -> None:
        with self._changes.lock, self._changes:
            if self._closed:
                return  # `unpack` says so, if anything is missing
            self._collect()
            if not group.reached:
                if not group.pass_.begun:
                    self._copies.judge_pass(group.pass_)
                self._order.reached(group)
                self._prefetch.boundary(group, forward=False)
                if self._auto is not None:
                    self._copies.resident_limit_bytes = self._auto.visit(group, False, self._backend)
            self._copies.reached(group)
            self._copies.let_go()
            self._prefetch.ahead(group, forward=False)

    def _take(
        self, region: Region, refs: Sequence[SlotRef], later: Sequence[Tensor]
    ) -> tuple[list[Slot], list[Slot], int]:
        """The slots of a commit; those that it owns from now on; and the bytes of those that are copied already."""
        left = {tensor.untyped_storage()._cdata for tensor in later} if later else ()
        slots: list[Slot] = []
        own: list[Slot] = []
        pending_bytes = small_bytes = 0
        for slot in {ref(): None for ref in refs}:
            if slot is None or slot.key in left:
                continue
            if slot.ref.block is not None:
                pending_bytes += slot.num_bytes
            elif not slot.wanted:
                small_bytes += slot.num_bytes
            elif slot.storage is not None and slot.owner is None:
                slot.owner, slot.position = (region.module, region.layer), len(slots)
                slot.ref.is_resident = True
                own.append(slot)
            slots.append(slot)
        if small_bytes:
            self._copies.module_stats(region.module).small_bytes += small_bytes
        return slots, own, pending_bytes

    def _offload(self, group: Group, own: list[Slot]) -> int:
        """Copy out those of a group's own slots that are to move, and return their bytes."""
        self._copies.resident(group.saved_bytes)
        has_room = self._auto is None or self._auto.has_room(group, self._copies.staying_bytes)
        moving = self._selection.moving(own, group, self._order.usual_length(group.pass_), has_room)
        if len(moving) < len(own):
            kept_bytes = group.saved_bytes - sum([slot.num_bytes for slot in moving])
            self._copies.module_stats(group.key[0]).kept_bytes += kept_bytes
        return self._copies.offload(moving, group.key[0]) if moving else 0

    def _goes_on(self, slot: Slot, forward: int, region: Region) -> bool:
        """Whether the forward that copied a slot does; where none was told of, as far as the order of commits tells."""
        if forward or slot.forward:
            return slot.forward == forward
        return self._order.goes_on(slot.pass_, (region.module, region.layer))

    def _learn(self, groups: list[GroupTimes], boundaries_ms: list[float], unused_bytes: int | None) -> None:
        bound_bytes = self._copies.own_bound_bytes if self._auto is None else None
        self._selection.learn(groups, boundaries_ms, self._timing, bound_bytes, unused_bytes)

    def _collect(self) -> None:
        """Clean up after slots that died since the last call. When none is left, a step may have ended."""
        if not self._dead_slots:
            return
        while self._dead_slots:
            self._forget(self._dead_slots.popleft())
        if not self._slots:
            self._exclusions.stale = True
            if not self._steps_are_told:
                self._end_step()

    def _forget(self, dead_slot: SlotRef) -> None:
        """Clean up after a slot that died. Does nothing the second time."""
        if not hasattr(dead_slot, "source"):
            return
        self._copies.release(dead_slot)
        if self._slots.get(dead_slot.key) is dead_slot:
            del self._slots[dead_slot.key]
        dead_slot.give_back_source()
        self._alive.pop(id(dead_slot), None)

    def _recover(self) -> None:
        """Make everything anew from the slots that are alive, after a change that was not finished. Learned durations
        and what was ineffective stay; the order of passes is learned again."""
        self._backend.synchronize()
        for ref in list(self._alive.values()):
            if ref() is None:
                self._forget(ref)
        self._copies.rebuild([slot for ref in self._alive.values() if (slot := ref()) is not None])
        self._order = BackwardOrder()
        self._prefetch = Prefetch(self._order, self._timing, self._copies, self._max_prefetch_bytes)
        self._timing.forget_steps()
        if self._auto is not None:
            self._auto.forget_step()
        self._exclusions.stale = True

    def _end_step(self) -> None:
        self._selection.end_step()
        self._timing.end_step()
        if self._auto is not None:
            self._auto.end_step(self._backend, self._copies, self._timing, self._selection)
