"""Hooks for saved tensors, which torch keeps on a stack of each thread, and which no interrupt leaves there for good.

`with region:` pushes hooks and pops them. An interrupt can come after the push, or before the first line of
`__exit__`, where nothing that is written in Python can help. So hooks are known by whose methods they are, and a region
is *open* by a lock: hooks of a region that is not open were left, and are taken off at the next tensor that comes to
them, or when the next region is entered.

- Who can, holds that lock by a `with` of its own around whatever pushes and pops: it is let go of then, whatever comes
  (`adapters.call_hooks`).
- Else the frame tells whose `with` it is: when the thread is in it no more, the region was left. A generator's frame
  may come back. The frames are kept by the thread. Did regions keep them, they would never go: a frame holds tensors,
  whose graph holds handles, which hold regions, through C++, where the garbage collector does not look.
"""

import inspect
import sys
import threading
from collections.abc import Callable
from functools import partial
from types import FrameType, TracebackType
from typing import Any, Self

import torch

# What `torch.autograd.graph.saved_tensors_hooks` calls, without its object and the calls of its methods.
_push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
_pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
_top_hooks = partial(torch._C._autograd._top_saved_tensors_default_hooks, True)

type Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]
"""For a tensor that is saved, and for what the first made of it."""


class HookedRegion:
    """A context manager that has hooks on while it is entered with grad enabled. It can be entered again.

    The first of the hooks must be a method of the region.
    """

    __slots__ = ("_entered", "open")

    def __init__(self) -> None:
        self._entered: list[bool] = []  # by entry that is not left: whether it pushed hooks
        self.open = threading.Lock()
        """Locked while the region is."""

    def hooks(self) -> Hooks:
        """What is on from here on."""
        raise NotImplementedError

    def forget(self) -> None:
        """Entering it, or what was done inside, has failed."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        self.enter(sys._getframe(1))
        return self

    def enter(self, frame: FrameType | None) -> None:
        """Enter, for a `with` in `frame`."""
        remove_left_hooks()
        while frame is not None and frame.f_globals.get("__name__") == "contextlib":
            frame = frame.f_back
        hooked = torch.is_grad_enabled()
        try:
            if frame is not None and not self._entered:
                _here.entered.append((self, frame))
            self._entered.append(hooked)
            self.open.acquire(blocking=False)
            if hooked:
                self.push_hooks()
        except BaseException:
            self._leave(failed=True)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._leave(failed=error is not None)
        except BaseException:
            self._leave(failed=True)
            raise

    def _leave(self, failed: bool) -> None:
        """Undo what entering has done; after a failure, whatever of it was done."""
        if self._entered and self._entered[-1]:
            if failed or not self.open.locked():
                self.remove_hooks()
            else:
                _pop_hooks()
        if failed:
            self.forget()
        if self._entered:
            self._entered.pop()
        if not self._entered:
            _here.entered = [each for each in _here.entered if each[0] is not self]
            if self.open.locked():
                self.open.release()

    def push_hooks(self) -> None:
        """Let autograd hand this region what it saves, from here on."""
        _push_hooks(*self.hooks())

    def remove_hooks(self) -> None:
        """Take the hooks off, if they are there, wherever they are among others."""
        above = []
        while (top := _top_hooks()) is not None:
            _pop_hooks()
            if getattr(top[0], "__self__", None) is self:
                break
            above.append(top)
        for hooks in reversed(above):
            _push_hooks(*hooks)


class _Here(threading.local):
    """What this thread has entered and not left, each with the frame whose `with` it is."""

    def __init__(self) -> None:
        self.entered: list[tuple[HookedRegion, FrameType]] = []


_here = _Here()


def remove_left_hooks() -> None:
    """Take off what an interrupt left on top."""
    entered = _here.entered
    while entered and not _is_running(entered[-1][1]):
        region, _ = entered.pop()
        if region.open.locked():
            region.open.release()
    while (top := _top_hooks()) is not None:
        found = getattr(top[0], "__self__", None)
        if not isinstance(found, HookedRegion) or found.open.locked():
            return
        _pop_hooks()


def _is_running(frame: FrameType) -> bool:
    """Whether this thread is in it, or may come back to it."""
    if frame.f_code.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR):
        return True
    current: FrameType | None = sys._getframe(1)
    while current is not None and current is not frame:
        current = current.f_back
    return current is not None
