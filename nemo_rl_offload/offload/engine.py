"""Keep a forward pass's large saved tensors in host memory until just before their backward needs them.

Mechanism. While a region is open, autograd hands every tensor it saves to `pack`, which answers with a
handle. A handle names a slot; a slot is one storage, however many views of it are saved and by however many
regions. `commit` copies the slots that the region saved to the arena, lets go of their device memory once the
copy has ended, and puts a hook on the node that made the region's output: backward arrives there first, and
the hook starts the reload of this group and of the groups committed before it, which backward will want next.
`unpack` needs only the handle, so nothing here counts microbatches or expects an order: any number of graphs,
backward in any order, twice, or never.

A slot:  RESIDENT - commit -> COPYING_OUT - copied -> HOST - reload -> COPYING_IN - unpack -> RESIDENT
It is gone, with its block, when the last handle is: the graph owns handles, handles own slots, and everything
else here refers to slots weakly. Backward frees each node's tensors as it goes, as without offloading.

Four things that are easy to get wrong:
- `pack` keeps `t.detach()`, never `t`. A tensor saved by the node that made it (exp, attention) has that node
  as its `grad_fn`; a handle that held it would close a cycle through C++, invisible to the garbage collector.
- A storage's address is used again after it is freed, so an address alone names nothing. A slot holds a weak
  reference to its storage, which keeps the address taken while the memory goes; it also tells whether the
  memory did go.
- A storage written in place after its copy is different content for whoever saves it next. A slot keeps a
  *witness* of each tensor it copied, an empty tensor that shares the original's version counter, and is
  shared only while no witness has moved. A tensor changed before its copy is an error when backward wants it,
  as in plain autograd.
- Finalizers run anywhere, inside this module too. They take no lock and call nothing: they append to a deque.

Rejected: an identity autograd node around the region, the usual carrier of the reload. At the start it
changes the order in which gradients are summed (differences of 1e-8); at the end it makes the output a view,
which pipeline code that frees outputs refuses. A hook on the node that is already there changes nothing.

Limit: one device and one compute stream per engine. Whole storages move: a small view of a large storage
moves it all.
"""

import copy
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from types import TracebackType
from typing import Self, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Parameter

from nemo_rl_offload.offload.arena import HostArena
from nemo_rl_offload.offload.backends.base import Backend, Spec
from nemo_rl_offload.offload.slots import (
    CopyOut,
    Group,
    Handle,
    Kept,
    Remains,
    Slot,
    State,
    changed_in_place,
    deref,
    unchanged,
)
from nemo_rl_offload.offload.stats import ModuleStats, OffloadStats

T = TypeVar("T", bound=Tensor | Sequence[Tensor | None])


class Region:
    """One occurrence of `module` in `layer`. A context manager: tensors saved inside go to the engine. It can
    be entered again until it is committed, and other regions can open, close and be committed in between."""

    def __init__(self, engine: "OffloadEngine", module: str, layer: int | str) -> None:
        self.module = module
        self.layer = layer
        self._engine = engine
        self._slots: list[weakref.ref[Slot]] = []
        self._hooks: list[saved_tensors_hooks | None] = []

    def __enter__(self) -> Self:
        hooks = self._engine._hooks(self) if torch.is_grad_enabled() else None
        if hooks is not None:
            hooks.__enter__()
        self._hooks.append(hooks)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        hooks = self._hooks.pop()
        if hooks is not None:
            hooks.__exit__(kind, error, traceback)
        if error is not None:
            self._slots.clear()

    def __str__(self) -> str:
        return f"{self.module} of layer {self.layer}"


class OffloadEngine:
    """Offloads the saved tensors of one model on one device. See the module's text for how.

    Args:
        backend: the device; tensors on other devices are left alone.
        host_memory_budget_bytes: the most host memory taken; what does not fit stays on the device.
        min_tensor_bytes, min_tensor_elements: a tensor below either is not worth a copy. A smaller view of a
            storage that is offloaded anyway goes with it.
        max_inflight_bytes: device memory that copies out may hold before the compute stream waits for them.
        max_prefetch_bytes: device memory for groups reloaded ahead of the one that backward has reached.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        host_memory_budget_bytes: int,
        min_tensor_bytes: int = 1 << 20,
        min_tensor_elements: int = 0,
        max_inflight_bytes: int = 1 << 30,
        max_prefetch_bytes: int = 1 << 30,
    ) -> None:
        self._backend = backend
        self._arena = HostArena(backend, host_memory_budget_bytes)
        self._min_tensor_bytes = min_tensor_bytes
        self._min_tensor_elements = min_tensor_elements
        self._max_inflight_bytes = max_inflight_bytes
        self._max_prefetch_bytes = max_prefetch_bytes
        # Backward runs in autograd's threads, one per device and the caller's: nodes on the CPU and on the
        # device may unpack at the same moment. Nothing called under this lock enters the engine again.
        self._lock = threading.Lock()
        self._slots: dict[int, weakref.ref[Slot]] = {}  # by storage address: the newest slot of that storage
        self._graveyard: deque[Remains] = deque()
        self._inflight: deque[CopyOut] = deque()
        self._inflight_bytes = 0
        self._unused_bytes = 0  # reloaded, not unpacked yet
        self._last_group: weakref.ref[Group] | None = None
        self._excluded: dict[int, weakref.ref[Tensor]] = {}  # by id
        self._excluded_storages: set[int] = set()
        self._exclusions_stale = False
        self._empty = torch.empty(0, device=backend.device)
        self._stats = OffloadStats()
        self._closed = False

    def region(self, module: str, layer: int | str) -> Region:
        """A region to enter around `module`'s computation, then to `commit`. Without grad it does nothing."""
        assert not self._closed, "the offload engine is closed"
        return Region(self, module, layer)

    def exclude(self, tensors: Iterable[Tensor]) -> None:
        """Never offload anything on these tensors' storages: parameters, and buffers that outlive a step. A
        tensor whose `.data` moves to another storage stays excluded; so do views of it."""
        with self._lock:
            assert not self._closed, "the offload engine is closed"
            for tensor in tensors:
                self._excluded[id(tensor)] = weakref.ref(tensor)
                self._excluded_storages.add(tensor.untyped_storage()._cdata)

    def commit(self, region: Region, output: T, release: Sequence[Tensor] = (), later: Sequence[Tensor] = ()) -> T:
        """Start copying out what `region` saved; `output` (a tensor, or a sequence whose first element is
        one), made by the region or after it, starts the reload when backward reaches it. Returns `output`
        itself.

        Storages of `release` that were offloaded are shrunk to nothing once their copy has ended, whoever
        else holds them. The caller guarantees that nobody reads them again except through plain tensors
        saved inside this engine's regions: a node outside of every region that saved one finds it empty.

        Storages of `later` are left to a following region that saves them too, and are counted as that one's:
        the copy would hold a tensor that the next module still reads.

        When `output` needs no gradient, no backward will come: everything stays as it is.
        """
        assert not region._hooks, "commit a region after leaving it"
        first = output if isinstance(output, Tensor) else output[0]
        node = None if first is None else first.grad_fn
        refs, region._slots = region._slots, []
        if node is None:
            return output
        with self._lock:
            assert not self._closed, "the offload engine is closed"
            self._collect()
            left = {tensor.untyped_storage()._cdata for tensor in later}
            for ref in refs:
                slot = ref()
                if slot is None or slot.key in left:
                    continue
                if slot.wanted and slot.uncopied and not slot.denied:
                    self._offload(slot, region.module)
            for tensor in release:
                self._shrink(tensor)
            self._retire()
            group = Group(refs, self._last_group)
            if not any(group.offloaded_slots()):
                return output
            self._last_group = weakref.ref(group)
            self._module_stats(region.module).num_groups += 1
        # The hook outlives backward wherever the user keeps the loss; a group refers to its slots weakly.
        node.register_prehook(partial(self._backward_reached, group))
        return output

    def end_step(self) -> None:
        """Bring the figures up to date. Never needed for correctness."""
        with self._lock:
            assert not self._closed, "the offload engine is closed"
            self._collect()
            self._retire()
            self._exclusions_stale = True

    def stats(self) -> OffloadStats:
        """A copy of the totals since the engine was built."""
        with self._lock:
            self._collect()
            totals = copy.deepcopy(self._stats)
            totals.host_bytes = self._arena.used_bytes
            totals.peak_host_bytes = self._arena.peak_bytes
            totals.host_capacity_bytes = self._arena.capacity_bytes
            return totals

    def close(self) -> None:
        """Give the host memory back; once is enough. No use after it but `stats`, nor a pending backward."""
        with self._lock:
            self._closed = True
            while self._inflight:
                self._backend.compute_wait(self._inflight[0].event)
                self._let_go_oldest()
            self._arena.close()

    def _hooks(self, region: Region) -> saved_tensors_hooks:
        if self._exclusions_stale:
            with self._lock:
                self._refresh_exclusions()
        return saved_tensors_hooks(partial(self._pack, region), self._unpack)

    def _pack(self, region: Region, tensor: Tensor) -> Handle | Kept:
        with self._lock:
            assert not self._closed, "the offload engine is closed"
            if not self._offloadable(tensor):
                kept = tensor if isinstance(tensor, Parameter) else tensor.detach()
                return Kept(kept, tensor._version, region)
            storage = tensor.untyped_storage()
            slot = deref(self._slots.get(storage._cdata))
            if slot is None or not slot.holds_content_of(tensor):
                slot = Slot(storage, self._graveyard)
                self._slots[slot.key] = weakref.ref(slot)
            detached = tensor.detach()
            if not slot.uncopied:
                detached.data = self._empty
            slot.saved.append((detached, tensor._version))
            num_elements = tensor.numel()
            slot.wanted |= (
                num_elements >= self._min_tensor_elements
                and num_elements * tensor.element_size() >= self._min_tensor_bytes
            )
            region._slots.append(weakref.ref(slot))
            offset = int(tensor.storage_offset())
            number = len(slot.saved) - 1
            return Handle(slot, number, tensor.dtype, tensor.size(), tensor.stride(), offset, region)

    def _unpack(self, packed: Handle | Kept) -> Tensor:
        if isinstance(packed, Kept):
            return unchanged(packed.tensor, packed.version, packed.where)
        slot = packed.slot
        with self._lock:
            if packed.number in slot.changed:
                raise changed_in_place(packed.where)
            if slot.uncopied:
                return unchanged(*slot.saved[packed.number], packed.where)
            if slot.offloaded:
                self._stats.demand_reloads += 1
                self._reload(slot)
            assert slot.reloaded is not None
            assert slot.in_event is not None
            self._backend.compute_wait(slot.in_event)
            slot.state = State.RESIDENT
            if slot.unused:
                slot.unused = False
                self._unused_bytes -= slot.num_bytes
            storage = slot.reloaded.untyped_storage()
            view = torch.empty(0, dtype=packed.dtype, device=self._backend.device)
            return view.set_(storage, packed.offset, packed.size, packed.stride)

    def _backward_reached(self, group: Group, grad_outputs: object) -> None:
        """Reload `group`, and as much of the groups committed before it as the prefetch cap allows."""
        with self._lock:
            self._collect()
            self._retire()
            for slot in group.offloaded_slots():
                self._reload(slot)
            while (ahead := group.next_offloaded()) is not None:
                for slot in ahead.offloaded_slots():
                    if self._unused_bytes + slot.num_bytes > self._max_prefetch_bytes:
                        return
                    self._reload(slot)

    def _offload(self, slot: Slot, module: str) -> None:
        block = self._arena.reserve(slot.num_bytes)
        if block is None:
            slot.denied = True
            self._stats.denied_bytes += slot.num_bytes
            return
        slot.block, slot.module = block, module
        source = torch.empty(0, dtype=torch.uint8, device=self._backend.device)
        source.set_(slot.saved[0][0].untyped_storage())
        block.last_event = self._backend.copy_out(source, block)
        self._inflight.append(CopyOut(weakref.ref(slot), source, block.last_event))
        self._inflight_bytes += slot.num_bytes
        slot.state = State.COPYING_OUT
        slot.changed.update(i for i, (tensor, version) in enumerate(slot.saved) if tensor._version != version)
        for tensor, _ in slot.saved:
            tensor.data = self._empty
        slot.saved = [(witness, witness._version) for witness, _ in slot.saved]
        self._stats.bytes_out += slot.num_bytes
        self._module_stats(module).bytes_out += slot.num_bytes

    def _reload(self, slot: Slot) -> None:
        assert not self._closed, "the offload engine was closed before the backward that needs it"
        assert slot.block is not None
        if not slot.source_freed():
            self._stats.ineffective_bytes += slot.num_bytes
        slot.reloaded, slot.in_event = self._backend.copy_in(slot.block, Spec(slot.num_bytes))
        slot.block.last_event = slot.in_event
        self._arena.release(slot.block)
        slot.block = None
        slot.state = State.COPYING_IN
        slot.unused = True
        self._unused_bytes += slot.num_bytes
        self._stats.bytes_in += slot.num_bytes
        self._module_stats(slot.module).bytes_in += slot.num_bytes

    def _shrink(self, tensor: Tensor) -> None:
        """Free the device memory of an offloaded storage: now, or when its copy has ended."""
        storage = tensor.untyped_storage()
        slot = deref(self._slots.get(storage._cdata))
        if slot is not None and slot.offloaded:
            slot.released = True
            if slot.state is State.HOST:
                storage.resize_(0)

    def _retire(self) -> None:
        """Let go of sources whose copy has ended; beyond the cap, the compute stream waits for the oldest."""
        while self._inflight:
            if not self._backend.done(self._inflight[0].event):
                if self._inflight_bytes <= self._max_inflight_bytes:
                    return
                self._backend.compute_wait(self._inflight[0].event)
            self._let_go_oldest()

    def _let_go_oldest(self) -> None:
        copy_out = self._inflight.popleft()
        self._inflight_bytes -= copy_out.source.numel()
        slot = copy_out.slot()
        if slot is None:
            return
        if slot.state is State.COPYING_OUT:
            slot.state = State.HOST
        if slot.released:
            copy_out.source.untyped_storage().resize_(0)

    def _collect(self) -> None:
        """Clean up after slots that died since the last call."""
        while self._graveyard:
            remains = self._graveyard.popleft()
            if remains.key in self._slots and self._slots[remains.key]() is None:
                del self._slots[remains.key]
                self._exclusions_stale |= not self._slots
            if remains.block is not None and not self._closed:
                self._arena.release(remains.block)
            if remains.loading is not None:  # freed only behind the copy that is still writing it
                self._backend.compute_wait(remains.loading[1])
            self._unused_bytes -= remains.unused_bytes

    def _offloadable(self, tensor: Tensor) -> bool:
        """Whether dtype, size, stride and offset describe it, it is on this device and not excluded."""
        if type(tensor) is not Tensor or tensor.layout is not torch.strided:
            return False
        if tensor.device != self._backend.device:
            return False
        if tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
            return False
        base = tensor._base
        if self._is_excluded(tensor) or (base is not None and self._is_excluded(base)):
            return False
        storage = tensor.untyped_storage()
        return storage.nbytes() > 0 and storage._cdata not in self._excluded_storages

    def _is_excluded(self, tensor: Tensor) -> bool:
        ref = self._excluded.get(id(tensor))
        return isinstance(tensor, Parameter) or (ref is not None and ref() is tensor)

    def _refresh_exclusions(self) -> None:
        """Look up where the excluded tensors are now. Done when no slot is left, thus between steps, not
        in each region: parameters are many, and a view of one is known by its base in any case."""
        tensors = {key: tensor for key, ref in self._excluded.items() if (tensor := ref()) is not None}
        self._excluded = {key: self._excluded[key] for key in tensors}
        self._excluded_storages = {tensor.untyped_storage()._cdata for tensor in tensors.values()}
        self._exclusions_stale = False

    def _module_stats(self, module: str) -> ModuleStats:
        return self._stats.per_module.setdefault(module, ModuleStats())
