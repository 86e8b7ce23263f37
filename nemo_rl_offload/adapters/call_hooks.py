"""Runs code around calls of chosen modules, without a trace on them.

A method that Python looks up on the class (`__call__`) is replaced there, for as long as some module is watched, by
one that looks the instance up: watched modules take the detour, all others go on at the price of one dictionary
lookup. So a watched model can be copied, pickled and saved as ever, and the detour goes around everything that
happens in a call: hooks, gradient checkpointing (transformers overrides `__call__` for it), code compiled by
`module.compile()`.

The detour is one frame deep: what goes around a call is told of its beginning and of its end, and does not call it. A
module that calls itself meets Python's limits only a little earlier than without: of calls through C, of which a
wrapping function takes four each time, it takes none more.

An interrupt may come anywhere. `Running` is held by `with` for as long as the call runs, whatever comes, and tells
later on whether what is found of a call was left by an interrupt.

Rejected: forward hooks and wrapped forwards. They are attributes, travel with copies and pickles, run inside of
checkpointing, where the saved input of the checkpoint is out of reach, and inside of compiled code. Hooks for all
modules (`register_module_forward_hook`) leave no trace, but run inside too, and torch warns of them when it compiles.

Limit: code that is being compiled is left alone, thus calls inside it are not seen.
"""

import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import nn

type Call = Callable[..., object]
type Running = threading.Lock
"""Locked while a call runs."""


class Around[T](Protocol):
    """What goes around a module's calls."""

    def enter(self, running: Running, args: tuple[object, ...], kwargs: Mapping[str, object]) -> T:
        """A call begins. What this returns is given to `leave` or `fail`; when it raises, it has left nothing."""

    def leave(self, entered: T, output: object) -> None:
        """The call has returned `output`."""

    def fail(self, entered: T) -> None:
        """The call has raised, or `leave` has: undo whatever is left of `enter`."""


_lock = threading.RLock()
_replacements: dict[tuple[type, str], "_Replacement"] = {}


class _Replacement:
    """The stand-in for one method of a class, there while `watched` has modules."""

    def __init__(self, owner: type, attribute: str) -> None:
        self.owner = owner
        self.attribute = attribute
        self.original: Call = vars(owner)[attribute]
        self.watched: dict[int, tuple[nn.Module, tuple[Around[Any], ...]]] = {}  # by id, which the module keeps taken
        self.method = self._make_method()

    def _make_method(self) -> Call:
        original, watched = self.original, self.watched

        @functools.wraps(original)
        def method(module: nn.Module, *args: object, **kwargs: object) -> object:
            if torch.compiler.is_compiling():
                return original(module, *args, **kwargs)
            found = watched.get(id(module))
            if found is None:
                return original(module, *args, **kwargs)
            running = threading.Lock()
            calls: list[tuple[Around[Any], Any]] = []
            with running:
                try:
                    for around in found[1]:
                        calls.append((around, around.enter(running, args, kwargs)))
                    output = original(module, *args, **kwargs)
                    while calls:
                        around, entered = calls[-1]
                        around.leave(entered, output)
                        calls.pop()
                except BaseException:
                    while calls:
                        around, entered = calls[-1]
                        around.fail(entered)
                        calls.pop()
                    raise
            return output

        return method

    def install(self) -> None:
        if vars(self.owner)[self.attribute] is self.original:
            setattr(self.owner, self.attribute, self.method)

    def restore(self) -> None:
        # Whoever replaced the method after us calls ours, which by now passes everything on.
        if vars(self.owner)[self.attribute] is self.method:
            setattr(self.owner, self.attribute, self.original)


def watch(module: nn.Module, attribute: str, arounds: tuple[Around[Any], ...]) -> Callable[[], None]:
    """Let `arounds`, the first outermost, go around `module`'s method of that name. Returns the way to end it,
    `unwatch`.

    One watcher at a time: check `is_watched` first.
    """
    key = _owner(module, attribute), attribute
    with _lock:
        if key not in _replacements:
            _replacements[key] = _Replacement(*key)
        watched = _replacements[key].watched
        assert id(module) not in watched
        watched[id(module)] = module, arounds
        _replacements[key].install()

    return functools.partial(unwatch, module, attribute, arounds)


def unwatch(module: nn.Module, attribute: str, arounds: tuple[Around[Any], ...]) -> None:
    """End what `watch` began with these `arounds`, as far as it came; twice does no harm."""
    key = _owner(module, attribute), attribute
    with _lock:
        replacement = _replacements.get(key)
        if replacement is None:
            return
        if replacement.watched.get(id(module)) == (module, arounds):
            del replacement.watched[id(module)]
        if not replacement.watched:
            replacement.restore()
            del _replacements[key]


def is_watched(module: nn.Module, attribute: str) -> bool:
    """Whether calls of `module`'s method of that name take a detour."""
    replacement = _replacements.get((_owner(module, attribute), attribute))
    return replacement is not None and id(module) in replacement.watched


def _owner(module: nn.Module, attribute: str) -> type:
    return next(cls for cls in type(module).__mro__ if attribute in vars(cls))
