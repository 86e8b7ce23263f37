"""Runs code around calls of chosen modules, without a trace on them.

A method that Python looks up on the class (`__call__`) is replaced there, for as long as some module is watched, by
one that looks the instance up: watched modules take the detour, all others go on at the price of one dictionary
lookup. So a watched model can be copied, pickled and saved as ever, and the detour goes around everything that
happens in a call: hooks, gradient checkpointing (transformers overrides `__call__` for it), code compiled by
`module.compile()`.

Rejected: forward hooks and wrapped forwards. They are attributes, travel with copies and pickles, run inside of
checkpointing, where the saved input of the checkpoint is out of reach, and inside of compiled code. Hooks for all
modules (`register_module_forward_hook`) leave no trace, but run inside too, and torch warns of them when it compiles.

Limit: code that is being compiled is left alone, thus calls inside it are not seen.
"""

import functools
import threading
from collections.abc import Callable

import torch
from torch import nn

type Call = Callable[..., object]
type Around = Callable[..., object]
"""Gets the call that it goes around, then that call's arguments; returns the result."""

_lock = threading.Lock()
_replacements: dict[tuple[type, str], "_Replacement"] = {}


class _Replacement:
    """The stand-in for one method of a class, there while `watched` has modules."""

    def __init__(self, owner: type, attribute: str) -> None:
        self.owner = owner
        self.attribute = attribute
        self.original: Call = vars(owner)[attribute]
        self.watched: dict[int, tuple[nn.Module, tuple[Around, ...]]] = {}  # by id, which the module keeps taken
        self.method = self._make_method()
        setattr(owner, attribute, self.method)

    def _make_method(self) -> Call:
        original, watched = self.original, self.watched

        @functools.wraps(original)
        def method(module: nn.Module, *args: object, **kwargs: object) -> object:
            if torch.compiler.is_compiling():
                return original(module, *args, **kwargs)
            found = watched.get(id(module))
            if found is None:
                return original(module, *args, **kwargs)
            call: Call = functools.partial(original, module)
            for around in reversed(found[1]):
                call = functools.partial(around, call)
            return call(*args, **kwargs)

        return method

    def restore(self) -> None:
        # Whoever replaced the method after us calls ours, which by now passes everything on.
        if vars(self.owner)[self.attribute] is self.method:
            setattr(self.owner, self.attribute, self.original)


def watch(module: nn.Module, attribute: str, arounds: tuple[Around, ...]) -> Callable[[], None]:
    """Let `arounds`, the first outermost, go around `module`'s method of that name. Returns the way to end it.

    One watcher at a time: check `is_watched` first.
    """
    key = _owner(module, attribute), attribute
    with _lock:
        if key not in _replacements:
            _replacements[key] = _Replacement(*key)
        watched = _replacements[key].watched
        assert id(module) not in watched
        watched[id(module)] = module, arounds

    def end() -> None:
        with _lock:
            del watched[id(module)]
            if not watched:
                _replacements.pop(key).restore()

    return end


def is_watched(module: nn.Module, attribute: str) -> bool:
    """Whether calls of `module`'s method of that name take a detour."""
    replacement = _replacements.get((_owner(module, attribute), attribute))
    return replacement is not None and id(module) in replacement.watched


def _owner(module: nn.Module, attribute: str) -> type:
    return next(cls for cls in type(module).__mro__ if attribute in vars(cls))
