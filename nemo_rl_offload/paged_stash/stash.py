"""Keeps what a group of experts saves for its backward in pages, from the end of its forward to its backward.

    with stash.region(num_rows, capacity, balanced_rows) as region:
        output = experts(x)             # every tensor of `capacity` rows; the first `num_rows` of them live
    region.commit(x)

Saved-tensor hooks note which storages the region saves. `commit` copies their live rows into pages on a side stream,
and the next region waits for those copies before it allocates its own buffers and lets go of the sources: one set of
worst-case buffers is alive at a time. The first tensor that backward asks for brings the whole group back; when the
gradient of the region's input is there, the group before it in the same forward starts on its way, since it is next. A
group whose backward comes at once, before its sources were let go of, takes those and only returns its pages.

Everything hangs on the group's own handles, not on a recorded schedule: any number of microbatches in any order works,
a pass without grad stashes nothing, and the pages of a graph that is dropped are returned at the next region.

Pools are sized from what a step needs, so the first step, and any step that is run again (`rerun.py`), runs without
pages and capacity: its tensors have exactly the rows that live, and the stash only counts pages, those of the balanced
case and those needed. `resize` then makes the pools. Rejected: pools of the worst case (they would need more than they
save), and one pool for all widths (pages of one size for rows of 2 and 14 kB waste a part of each).

An interrupt (Ctrl-C, MemoryError) may leave pages that nobody holds, or a freelist half written. A group's content is
always where its slot says, in pages or in its storage: a slot takes its record after the copy, and drops it after the
restore. Pools are what cannot be mended: the next region replaces them by new ones (`_is_changing` tells), and groups
that are alive keep the old ones, which go with them. Dead slots tell so from C, as `offload.changes` explains.

Limits: a storage is stashed when its rows lie one behind the other and fill it, and the saved tensor's first dimension
is the capacity, or it was marked; integers and rows of less than 16 bytes stay. Backward runs once.
"""

import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_rl_offload.offload.saved_hooks import HookedRegion, Hooks, remove_left_hooks
from nemo_rl_offload.paged_stash.kernels import STATE, Pool
from nemo_rl_offload.paged_stash.pages import num_pages
from nemo_rl_offload.paged_stash.stats import StashSizes

_MIN_ROW_BYTES = 16


@dataclass
class Demand:
    """Pages of one row width that are needed at a time, at most; counted while there are no pools."""

    now_balanced: int = 0
    now_needed: int = 0
    balanced: int = 0
    needed: int = 0

    def add(self, balanced: int, needed: int) -> None:
        """Pages come into use, or, negative, go."""
        self.now_balanced += balanced
        self.now_needed += needed
        self.balanced = max(self.balanced, self.now_balanced)
        self.needed = max(self.needed, self.now_needed)

    def scaled(self, factor: float) -> int:
        """Pages for a buffer size factor: positive, times the balanced case; negative, times the most seen."""
        return int(factor * self.balanced if factor >= 0 else -factor * self.needed)


@dataclass(eq=False)
class Slot:
    """One storage that a group saved: where its rows are now."""

    storage: torch.UntypedStorage | None
    num_bytes: int
    pool: Pool | None = None
    record: Tensor | None = None
    """The pages that hold it; None before they are taken, and when they are returned."""
    claim: "Claim | None" = None


class Claim(weakref.ref[Slot]):
    """What a slot holds, to be returned when it dies: pages, or a place in the demand."""

    __slots__ = ("counted", "pages")

    pages: tuple[Pool, Tensor] | None
    counted: tuple[Demand, int, int] | None


@dataclass(frozen=True)
class Handle:
    """A saved tensor: a view of a slot's storage."""

    group: "Group"
    slot: Slot
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


class Group:
    """One forward of a group of experts, of which `num_rows` [1] rows live. Handles hold it and their own slot; it
    holds no slot itself."""

    def __init__(self, num_rows: Tensor, previous: "Group | None") -> None:
        self.num_rows = num_rows
        self.previous = None if previous is None else weakref.ref(previous)
        self.slots: list[weakref.ref[Slot]] = []
        self.is_loading = False

    def paged(self) -> list[Slot]:
        """Slots that something still needs and that hold pages."""
        slots = [reference() for reference in self.slots]
        return [slot for slot in slots if slot is not None and slot.record is not None]


class StashRegion(HookedRegion):
    """The forward of one group of experts; see `PagedStash.region`."""

    def __init__(self, stash: "PagedStash", group: Group, capacity: int, balanced_rows: int) -> None:
        super().__init__()
        self._stash, self._group = stash, group
        self._capacity, self._balanced_rows = capacity, balanced_rows
        self._slots: dict[int, Slot] = {}
        self._marked: set[int] = set()
        self._excluded: set[int] = set()

    def mark(self, tensor: Tensor) -> None:
        """Stash this tensor's storage too, whose rows are the capacity's though its shape [...] begins
        otherwise."""
        self._marked.add(tensor.untyped_storage().data_ptr())

    def exclude(self, tensors: Iterable[Tensor]) -> None:
        """Leave these storages alone: parameters, whose shape [...] may begin with the capacity by chance."""
        self._excluded.update(tensor.untyped_storage().data_ptr() for tensor in tensors)

    def hooks(self) -> Hooks:
        return self._pack, self._stash.unpack

    def forget(self) -> None:
        self._slots = {}

    def commit(self, entry: Tensor) -> None:
        """Start the copies. `entry` is the region's input [capacity, ...]: its gradient ends the region's backward."""
        slots, self._slots = list(self._slots.values()), {}
        self._group.slots = [weakref.ref(slot) for slot in slots]
        self._stash.stash(self._group, slots, self._capacity, self._balanced_rows)
        if entry.requires_grad and self._group.previous is not None:
            previous, stash = self._group.previous, self._stash
            entry.register_hook(lambda _: stash.prefetch(previous()))  # type: ignore[no-untyped-call]

    def _pack(self, tensor: Tensor) -> Tensor | Handle:
        """Autograd's hook for what is saved, any shape: a handle, or the tensor itself."""
        if not self.open.locked():
            remove_left_hooks()
            return tensor.detach()
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        if key in self._excluded or not self._is_of_rows(tensor, storage, key):
            return tensor.detach()
        slot = self._slots.setdefault(key, Slot(storage, storage.nbytes()))
        return Handle(self._group, slot, tensor.dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride())

    def _is_of_rows(self, tensor: Tensor, storage: torch.UntypedStorage, key: int) -> bool:
        """Whether a tensor of any shape lies in a storage of the capacity's rows."""
        row_bytes, rest = divmod(storage.nbytes(), self._capacity) if self._capacity else (0, 1)
        if rest or row_bytes < _MIN_ROW_BYTES or not tensor.is_floating_point():
            return False
        if key in self._marked:
            return True
        is_a_row_each = tensor.ndim > 0 and tensor.shape[0] == self._capacity
        return is_a_row_each and tensor.stride(0) * tensor.element_size() == row_bytes


class PagedStash:
    """The stash of one model: pools by row width, and the groups that are in them.

    `factor_cuda` and `factor_cpu` are the sizes of the device's and the host's tier (`Demand.scaled`).
    """

    def __init__(self, device: torch.device, *, page_size: int, factor_cuda: float, factor_cpu: float) -> None:
        self.device, self.page_size = device, page_size
        self._factors = (factor_cuda, factor_cpu)
        self.pools: dict[int, Pool] = {}
        self._demands: dict[int, Demand] = {}
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._is_forked = False
        self._sources: list[Slot] = []
        self._in_use: list[object] = []  # by the side stream
        self._claims: dict[int, Claim] = {}  # by id; of slots that are alive
        self._dead: deque[Claim] = deque()
        self._is_changing = self._is_broken = False
        self._last: weakref.ref[Group] | None = None
        self.is_paging = False
        """Whether tensors go into pages; without, they stay and are counted."""

    def begin_forward(self) -> None:
        """A forward of a model chunk begins: its first group has none before it."""
        self._last = None

    def region(self, num_rows: Tensor, capacity: int, balanced_rows: int) -> StashRegion:
        """A region whose tensors have `capacity` rows, of which the first `num_rows` live.

        `num_rows`: int64 or int32 [1], on the device, and not written again. `balanced_rows`: how many live
        when all experts of the model get the same number of tokens.
        """
        self._settle()
        self._replace_broken_pools()
        self._return_abandoned()
        group = Group(num_rows, None if self._last is None else self._last())
        self._last = weakref.ref(group)
        return StashRegion(self, group, capacity, balanced_rows)

    def stash(self, group: Group, slots: Sequence[Slot], capacity: int, balanced_rows: int) -> None:
        """Copy a group's live rows into pages; the sources are let go of when the next region begins."""
        self._begin_change()
        self._in_use.append(group.num_rows)
        with self._on_side():
            for slot in slots:
                assert slot.storage is not None
                if slot.storage.nbytes() == 0:  # emptied by a checkpoint without output, which fills it again
                    continue
                row_bytes = slot.num_bytes // capacity
                pool = self.pools.get(row_bytes) if self.is_paging else None
                if pool is None:
                    self._count(slot, row_bytes, balanced_rows, capacity)
                    continue
                record = pool.new_record(capacity)
                pool.stash(_as_bytes(slot.storage), group.num_rows, record)
                self._claim(slot, (pool, record), None)
                slot.pool, slot.record = pool, record
                self._sources.append(slot)
        self._is_changing = False

    def _claim(self, slot: Slot, pages: tuple[Pool, Tensor] | None, counted: tuple[Demand, int, int] | None) -> None:
        claim = slot.claim = Claim(slot, self._dead.append)
        claim.pages, claim.counted = pages, counted
        self._claims[id(claim)] = claim

    def _count(self, slot: Slot, row_bytes: int, balanced_rows: int, rows: int) -> None:
        balanced, needed = num_pages(balanced_rows, self.page_size), num_pages(rows, self.page_size)
        demand = self._demands.setdefault(row_bytes, Demand())
        demand.add(balanced, needed)
        self._claim(slot, None, (demand, balanced, needed))

    def unpack(self, packed: Tensor | Handle) -> Tensor:
        """A saved tensor, of any shape, for its backward; the whole group comes back with the first one."""
        if isinstance(packed, Tensor):
            return packed
        group, slot = packed.group, packed.slot
        if slot.record is not None:
            self._load(group)
        if group.is_loading:
            self._settle()
            group.is_loading = False
        assert slot.storage is not None
        view = torch.empty(0, dtype=packed.dtype, device=self.device)
        return view.set_(slot.storage, packed.offset, packed.size, packed.stride)

    def prefetch(self, group: Group | None) -> None:
        """Start a group on its way back, if it is still needed."""
        if group is not None:
            self._load(group)

    def _load(self, group: Group) -> None:
        """Bring a group back, on the side stream; what has not been let go of yet only returns its pages."""
        self._begin_change()
        paged = group.paged()
        missing = [slot for slot in paged if slot.storage is None]
        kept = [slot for slot in paged if slot.storage is not None]
        with self._on_side():
            for slot in kept:
                pool, record = self._take_record(slot)
                pool.release(record)
        self._settle()
        targets = [torch.empty(slot.num_bytes, dtype=torch.uint8, device=self.device) for slot in missing]
        with self._on_side():
            for slot, target in zip(missing, targets, strict=True):
                assert slot.pool is not None
                assert slot.record is not None
                self._in_use.append(target)
                group.is_loading = True
                slot.pool.restore(target, slot.record)
                slot.storage = target.untyped_storage()
                self._take_record(slot)
        self._is_changing = False

    def _take_record(self, slot: Slot) -> tuple[Pool, Tensor]:
        """The pages that a slot holds from now on no more."""
        pool, record = slot.pool, slot.record
        assert pool is not None
        assert record is not None
        assert slot.claim is not None
        slot.record = None
        slot.claim.pages = None
        self._claims.pop(id(slot.claim), None)
        self._in_use.append(record)
        return pool, record

    def _on_side(self) -> AbstractContextManager[object]:
        """Work on the side stream, after all that the compute stream was given so far."""
        if self._stream is None:
            return nullcontext()
        self._is_forked = True
        self._stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._stream)

    def _settle(self) -> None:
        """The compute stream waits for the side stream; what that worked on may go.

        Only where that was given work since: a stream that is being captured may not wait for work outside the graph.
        """
        if self._stream is not None and self._is_forked:
            torch.cuda.current_stream().wait_stream(self._stream)
            self._is_forked = False
        for slot in self._sources:
            if slot.record is not None:
                slot.storage = None
        self._sources.clear()
        self._in_use.clear()

    def _return_abandoned(self) -> None:
        if not self._dead:
            return
        self._begin_change()
        with self._on_side():
            while self._dead:
                claim = self._dead.popleft()
                self._claims.pop(id(claim), None)
                if claim.pages is not None:
                    pool, record = claim.pages
                    pool.release(record)
                    self._in_use.append(record)
                elif claim.counted is not None:
                    demand, balanced, needed = claim.counted
                    demand.add(-balanced, -needed)
        self._is_changing = False

    def _begin_change(self) -> None:
        if self._is_changing:
            self._is_broken = True
        self._is_changing = True

    def _replace_broken_pools(self) -> None:
        """Those of which pages may be lost, because a change was interrupted. Copies may be under way in them."""
        if not self._is_changing and not self._is_broken:
            return
        for row_bytes, pool in list(self.pools.items()):
            self.pools[row_bytes] = Pool(row_bytes, self.page_size, pool.num_device, pool.num_host, self.device)
        for demand in self._demands.values():
            demand.now_balanced = demand.now_needed = 0
        for claim in list(self._claims.values()):
            if claim() is None:
                del self._claims[id(claim)]
            claim.counted = None
        self._dead.clear()
        self._is_changing = self._is_broken = False

    def end_step(self) -> None:
        """The graphs of a step are gone: return the pages of those that had no backward, and join the streams."""
        self._return_abandoned()
        self._settle()

    def flags(self) -> Tensor:
        """[a tensor found too few pages, one went to the host], bool, on the device, since `clear_flags`."""
        states = [pool.state for pool in self.pools.values()]
        if not states:
            return torch.zeros(2, dtype=torch.bool, device=self.device)
        counters = torch.stack(states)[:, [STATE.index("overflowed"), STATE.index("spilled")]]
        return (counters > 0).any(0)

    def clear_flags(self) -> None:
        """Forget them, for the next step."""
        for pool in self.pools.values():
            pool.state[STATE.index("overflowed")].zero_()
            pool.state[STATE.index("spilled")].zero_()

    def resize(self) -> None:
        """Make the pools that the steps counted so far need, and page from now on. No group may be alive."""
        self.end_step()
        for row_bytes, demand in self._demands.items():
            num_device, num_host = (demand.scaled(factor) for factor in self._factors)
            pool = self.pools.get(row_bytes)
            if pool is None or (pool.num_device, pool.num_host) != (num_device, num_host):
                self.pools.pop(row_bytes, None)  # its memory goes before the new one's comes
                self.pools[row_bytes] = Pool(row_bytes, self.page_size, num_device, num_host, self.device)

    def needed_factor(self) -> float | None:
        """What the counted steps needed at most, as a multiple of the balanced case; None before one was counted."""
        ratios = [demand.needed / demand.balanced for demand in self._demands.values() if demand.balanced]
        return max(ratios, default=None)

    def sizes(self) -> StashSizes:
        """In bytes; the most that was in use. The host waits for the device."""
        pools = [(pool, pool.page_size * pool.row_bytes) for pool in self.pools.values()]
        return {
            "device_bytes": sum(pool.num_device * page_bytes for pool, page_bytes in pools),
            "host_bytes": sum(pool.num_host * page_bytes for pool, page_bytes in pools),
            "peak_bytes": sum(pool.counters()["peak"] * page_bytes for pool, page_bytes in pools),
        }


def _as_bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
