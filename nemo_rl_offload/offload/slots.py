"""What the engine keeps: a `Slot` for a storage, a `Handle` for a saved tensor, a `Group` for a commit, a `ForwardPass`
for a forward. `engine` says how they work together."""

import enum
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_rl_offload.offload.backends.base import Block, Event
from nemo_rl_offload.offload.stats import ModuleStats

type Key = tuple[str, int | str]
"""Module and layer: names a group across steps."""

type Phase = tuple[int, int]
"""How many passes wait for their backward, and whether the pipeline fills, is full or drains (`backward_order`)."""

type Place = tuple[Key, int]
"""A slot's group, and its position there: names a slot across steps."""

type Handle = tuple[Slot, Tensor, int, object]
"""What autograd keeps in place of a saved tensor: a slot, one of its saved tensors, that one's version, and where it
was saved. A plain tuple, since one is made for every tensor."""

type Kept = tuple[Tensor, int, object]
"""The same for a saved tensor that this engine leaves alone: the tensor, its version, and where it was saved."""

# What `torch.multiprocessing.reductions.StorageWeakRef` wraps, at a third of its time.
_storage_expired: Callable[[int], bool] = torch.UntypedStorage._expired  # type: ignore[assignment]
_free_storage_ref: Callable[[int], None] = torch.UntypedStorage._free_weak_ref

set_storage: Callable[[Tensor, Tensor], None] = torch._functionalize_unsafe_set
"""Gives the first tensor the second one's storage, and leaves everything else as it is, its version too: `set_` without
its checks, at a quarter of its time. What does not lie in that storage must not be read."""


class State(enum.Enum):
    RESIDENT = enum.auto()
    COPYING_OUT = enum.auto()
    HOST = enum.auto()
    COPYING_IN = enum.auto()


# Names of their own: one look-up instead of two, on every saved tensor's way.
RESIDENT, COPYING_OUT, HOST, COPYING_IN = State


class Arrival:
    """The end of a copy back, of one slot or of several together."""

    __slots__ = ("event", "is_timed")

    def __init__(self, event: Event) -> None:
        self.event = event
        self.is_timed = False  # the first wait for it is recorded; those behind it take no time


class SlotRef(weakref.ref["Slot"]):
    """A slot, referred to weakly; and what has to be cleaned up after it, for it outlives the slot.

    When the slot dies, this is appended to a deque: by `deque.append` itself, since no interrupt can come between a
    finalizer in C and its end. One in Python, `__del__` or `weakref.finalize`, can be interrupted before its first
    line, and Python then drops both it and the interrupt.
    """

    __slots__ = ("block", "is_resident", "key", "loading", "num_bytes", "source", "unused")

    key: int
    num_bytes: int
    source: int
    """A weak reference to the storage, which keeps its address taken; 0 when it was given back. Set last: where it is
    missing, making the slot was interrupted, and there is nothing to clean up."""
    block: Block | None
    """While offloaded."""
    loading: tuple[Tensor, Event] | None
    """Of an unfinished copy in, the tensor that it writes, and its event."""
    unused: bool
    """Reloaded, and not unpacked yet."""
    is_resident: bool
    """On the device, and of a group: counted by `Copies`."""

    def give_back_source(self) -> None:
        """Let the storage's address be used again."""
        source, self.source = self.source, 0
        if source:
            _free_storage_ref(source)


class Slot:
    """One storage, and a detached tensor for each handle on it: `saved`, and `more` where there are several.

    While the slot has a block, these tensors have an empty storage and must not be read: each only witnesses, by its
    version counter, whether the original was written. Most slots have one handle; they make no list, for the garbage
    collector would look at it.
    """

    __slots__ = (
        "__weakref__", "arrival", "forward", "judged", "key", "more", "num_bytes", "owner", "pass_", "position",
        "ref", "released", "saved", "state", "stats", "storage", "versions", "wanted",
    )  # fmt: skip

    position: int  # among the slots of the first commit
    stats: ModuleStats  # of that commit's module, once copied

    def __init__(
        self,
        storage: torch.UntypedStorage,
        key: int,
        num_bytes: int,
        when_dead: Callable[[SlotRef], None],
        saved: Tensor,
        version: int,
    ) -> None:
        self.ref = ref = SlotRef(self, when_dead)
        ref.key = self.key = key
        ref.num_bytes = self.num_bytes = num_bytes
        ref.block = ref.loading = None
        ref.unused = ref.is_resident = False
        ref.source = storage._weak_ref()  # type: ignore[assignment]
        self.storage: torch.UntypedStorage | None = storage  # until it is copied out
        self.state = RESIDENT
        self.saved = saved
        self.more: tuple[Tensor, ...] = ()
        self.versions = version  # the sum of theirs when they were saved; a version only grows
        self.wanted = False  # a tensor at or above the threshold is among them
        self.judged = False  # known whether the copy freed the source
        self.released = False  # the source was shrunk by force
        self.owner: Key | None = None  # whose commit was the first
        self.forward = 0  # which forward of its thread saved it first
        self.pass_: ForwardPass | None = None  # of the first commit
        self.arrival: Arrival | None = None  # of the copy back

    @property
    def place(self) -> Place | None:
        return None if self.owner is None else (self.owner, self.position)

    @property
    def unwritten(self) -> bool:
        """Whether nothing was written since it was saved, as far as the saved tensors tell."""
        return self.saved._version + sum([witness._version for witness in self.more]) == self.versions

    def take_storage_of(self, other: Tensor) -> None:
        """Put the saved tensors on another storage."""
        set_storage(self.saved, other)
        for tensor in self.more:
            set_storage(tensor, other)

    def source_freed(self) -> bool:
        """Whether the device memory that was copied out is gone."""
        return self.released or _storage_expired(self.ref.source)

    def holds_content_of(self, tensor: Tensor) -> bool:
        """Whether a handle on `tensor`, whose storage is this slot's, can be served by this slot."""
        if self.storage is not None:
            return True
        return self.ref.block is not None and tensor._version == 0 and self.unwritten


class Group:
    """The slots of one commit. `saved_bytes` counts those that are this group's to move: large enough, and committed by
    it first."""

    __slots__ = ("__weakref__", "index", "key", "pass_", "pending_bytes", "reached", "saved_bytes", "slots", "stayed")

    pass_: "ForwardPass"
    index: int  # in its pass

    def __init__(self, key: Key, slots: list[SlotRef], saved_bytes: int) -> None:
        self.key = key
        self.slots = slots
        self.saved_bytes = saved_bytes
        self.reached = False  # by backward
        self.pending_bytes = 0  # on the host
        self.stayed = False  # by the engine's own choice

    def alive_slots(self) -> Iterator[Slot]:
        for ref in self.slots:
            slot = ref()
            if slot is not None:
                yield slot


class ForwardPass:
    """The groups of one forward, in the order of their commits."""

    __slots__ = ("begun", "first_key", "groups", "last_key", "loaded_to", "num_eligible", "phase")

    def __init__(self, first_key: Key) -> None:
        self.first_key = self.last_key = first_key
        self.groups: list[weakref.ref[Group]] = []
        self.num_eligible = 0
        self.loaded_to = 1 << 60  # index of the group down to which everything was reloaded ahead
        self.begun = False  # backward has reached it,
        self.phase: Phase | None = None  # the pipeline's, when that was

    def before(self, index: int) -> Iterator[Group]:
        """Groups from the one before `index` to the first."""
        for position in range(index - 1, -1, -1):
            group = self.groups[position]()
            if group is not None:
                yield group


@dataclass(slots=True, eq=False)
class CopiesOut:
    """A commit's copies, of `num_bytes` in all, that may still be reading their sources. By `expected_ms`, on the clock
    of what was learned, they will have ended."""

    slots: list[SlotRef]
    moves: list[tuple[torch.UntypedStorage, Block]]  # one for each slot
    num_bytes: int
    event: Event
    expected_ms: float
    module: str


def deref[V](ref: weakref.ref[V] | None) -> V | None:
    return None if ref is None else ref()


def unchanged(tensor: Tensor, version: int, where: object) -> Tensor:
    """`tensor`, of which `version` was saved; as plain autograd, refuses another one."""
    if tensor._version != version:
        raise RuntimeError(
            f"A tensor saved by {where} was changed in place before backward used it. Change a copy instead, or "
            f"leave out the in-place operation."
        )
    return tensor
