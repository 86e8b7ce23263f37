"""What the engine keeps per storage, saved tensor and commit; `engine` says how they work together."""

import enum
import weakref
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from nemo_rl_offload.offload.backends.base import Block, Event


class State(enum.Enum):
    RESIDENT = enum.auto()
    COPYING_OUT = enum.auto()
    HOST = enum.auto()
    COPYING_IN = enum.auto()


class Remains(NamedTuple):
    """What a dead slot leaves to be cleaned up."""

    key: int
    block: Block | None
    loading: tuple[Tensor, Event] | None
    unused_bytes: int


class Slot:
    """One storage. `saved` has, per handle, a detached tensor and its version when it was saved; after the
    copy out that tensor is a witness. Handles in `changed` were written in place before the copy."""

    __slots__ = (
        "__weakref__", "block", "changed", "denied", "graveyard", "in_event", "key", "module", "num_bytes",
        "released", "reloaded", "saved", "source", "state", "unused", "wanted",
    )  # fmt: skip

    def __init__(self, storage: torch.UntypedStorage, graveyard: deque[Remains]) -> None:
        self.source = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self.key = storage._cdata
        self.num_bytes = storage.nbytes()
        self.graveyard = graveyard
        self.state = State.RESIDENT
        self.saved: list[tuple[Tensor, int]] = []
        self.changed: set[int] = set()
        self.wanted = False  # a tensor at or above the threshold is among `saved`
        self.denied = False  # the arena had no room
        self.released = False  # the source was shrunk by force
        self.unused = False  # reloaded, and not unpacked yet
        self.module = ""  # of the first commit
        self.block: Block | None = None
        self.reloaded: Tensor | None = None  # the bytes, back on the device
        self.in_event: Event | None = None

    def __del__(self) -> None:
        loading = None
        if self.state is State.COPYING_IN and self.reloaded is not None and self.in_event is not None:
            loading = self.reloaded, self.in_event
        self.graveyard.append(Remains(self.key, self.block, loading, self.num_bytes if self.unused else 0))

    @property
    def offloaded(self) -> bool:
        return self.state in (State.COPYING_OUT, State.HOST)

    @property
    def uncopied(self) -> bool:
        return self.state is State.RESIDENT and self.reloaded is None

    def source_freed(self) -> bool:
        """Whether the device memory that was copied out is gone."""
        return self.released or bool(self.source.expired())  # type: ignore[no-untyped-call]

    def holds_content_of(self, tensor: Tensor) -> bool:
        """Whether a handle on `tensor`, whose storage is this slot's, can be served by this slot."""
        if self.uncopied:
            return True
        unwritten = tensor._version == 0 and all(w._version == version for w, version in self.saved)
        return self.offloaded and unwritten


class Handle(NamedTuple):
    """What autograd keeps in place of a saved tensor: a slot, and the view of it. Strides in elements."""

    slot: Slot
    number: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    where: object


class Kept(NamedTuple):
    """A saved tensor that this engine leaves alone, and its version when it was saved."""

    tensor: Tensor
    version: int
    where: object


class Group:
    """The offloaded slots of one commit, and the group committed before it."""

    __slots__ = ("__weakref__", "previous", "slots")

    def __init__(self, slots: list[weakref.ref[Slot]], previous: "weakref.ref[Group] | None") -> None:
        self.slots = slots
        self.previous = previous

    def offloaded_slots(self) -> Iterator[Slot]:
        for ref in self.slots:
            slot = ref()
            if slot is not None and slot.offloaded:
                yield slot

    def next_offloaded(self) -> "Group | None":
        """The nearest group before this one that has slots on the host. The chain is shortened on the way."""
        passed = [self]
        while (group := deref(passed[-1].previous)) is not None and not any(group.offloaded_slots()):
            passed.append(group)
        for each in passed:
            each.previous = passed[-1].previous
        return group


class CopyOut(NamedTuple):
    """A copy that may still be reading `source`."""

    slot: weakref.ref[Slot]
    source: Tensor
    event: Event


def deref[V](ref: weakref.ref[V] | None) -> V | None:
    return None if ref is None else ref()


def unchanged(tensor: Tensor, version: int, where: object) -> Tensor:
    if tensor._version != version:
        raise changed_in_place(where)
    return tensor


def changed_in_place(where: object) -> RuntimeError:
    return RuntimeError(
        f"A tensor saved by {where} was changed in place before backward used it. Change a copy instead, or "
        f"leave out the in-place operation."
    )
