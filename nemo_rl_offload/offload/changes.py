"""What an interrupt may break, and how it is mended: Ctrl-C in a notebook, `MemoryError`, any exception anywhere.

CPython raises KeyboardInterrupt between any two of the main thread's instructions at which it looks for signals, so
also where no `try` of ours is: after `acquire()` and before the `try:` below it, in a `finally`, in a finalizer. Code
that puts back by hand what it has half done cannot be made safe against that, for it can be interrupted, too. So
nothing is put back. Instead:

- The lock is taken by `with`. CPython does not look for signals between the return of a C lock's `__enter__` and the
  `with` block, nor at the block's end before `__exit__` has let go. It is therefore held for as long as the block
  runs, however often that is interrupted.
- `Changes`, entered under the lock, marks the engine as being changed. The mark goes when the change is finished.
  Whoever comes next and finds it makes the engine anew from the slots that are alive (`OffloadEngine._recover`), first
  of all; when that is interrupted, the mark stays, and the next one does it again.
- Where a slot's content is, is one field's affair (`Copies.rebuild` says which), set by one instruction: before it the
  old place still has the content, after it the new one has. Everything else (free memory, counts, copies under way, the
  plan of reloads) follows from the slots, or is forgotten.
- What dies tells so from C (`SlotRef`).
- Hooks for saved tensors that an interrupt left behind in torch are found and taken off (`saved_hooks`).

Rejected:
- Deferring SIGINT while the engine works: the handler is the user's to set (IPython sets it for each cell), it works in
  the main thread alone, and neither MemoryError nor what a debugger raises in other threads comes by a signal.
- An engine without a lock: backward runs in several threads.
- Another engine in place of the broken one: graphs that are alive would keep the old one's slabs beside the new ones.

Limit: an instruction between the block's end and `__exit__` at which CPython looks for no signal, but a trace function
can raise, leaves a lock. The same thread takes it again and drops the surplus; another would wait.
"""

import threading
from collections.abc import Callable
from types import TracebackType


class Changes:
    """`with changes.lock, changes: ...`, around whatever changes more than one slot."""

    __slots__ = ("_recover", "are_unfinished", "lock")

    def __init__(self, recover: Callable[[], None]) -> None:
        self._recover = recover
        self.lock = threading.RLock()
        self.are_unfinished = False
        """Under the lock, and outside of a change: the engine has to be made anew."""

    def __enter__(self) -> None:
        while self.lock._recursion_count() > 1:  # type: ignore[attr-defined]
            if self.are_unfinished:
                raise RuntimeError("the offload engine was used inside of its own work, by a finalizer or a handler")
            self.lock.release()
        if self.are_unfinished:
            self._recover()
        self.are_unfinished = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.are_unfinished = False
