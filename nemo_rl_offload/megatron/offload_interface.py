"""Puts this project's offload engine in the place of Megatron-Core's own.

Megatron's layers call one class, `FineGrainedActivationOffloadingInterface`, in a fixed way:
`manager = Interface(flag, tensor, module)`, `with manager as tensor: ...`, `output = manager.group_offload(output)`.
The class below has the same shape and hands regions to the engine. Several Megatron modules bind the class by name
when they are imported, and layers keep it when they are built; so it is replaced wherever it is bound, before any
layer is built. Since Megatron's contract is one class for the process, one engine is active in a process at a time.

`forced_released_tensors` are not shrunk. Megatron resizes their storage to nothing while other nodes may have saved
views of it: the value handed to core attention shares its storage with the query that a query norm saved. Our engine
lets go of its reference instead, and the memory is free when the layer's own frame ends.

The CUDA-graph calls of the contract are absent: no configuration of this project turns CUDA graphs on.
"""

import sys
from collections import Counter
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from megatron.core.pipeline_parallel import fine_grained_activation_offload as megatron_offload
from torch import Tensor

from nemo_rl_offload.offload.engine import OffloadEngine, Region

_CLASS_NAME = "FineGrainedActivationOffloadingInterface"

# Attention saves its own output, which is the input that the projection saves a moment later, while it reads it. The
# storage is left to the projection when that is offloaded too, and counted as its.
_READS_OUTPUT_OF = {"core_attn": "attn_proj"}


class OffloadInterface:
    """One occurrence of a module in a forward; Megatron's contract."""

    engine: ClassVar[OffloadEngine | None] = None
    modules: ClassVar[frozenset[str]] = frozenset()
    _enabled: ClassVar[bool] = True
    _occurrences: ClassVar[Counter[str]] = Counter()

    def __init__(self, offload: bool, tensor: Tensor, name: str) -> None:
        # The tensor is only lent: layers keep their manager, which must not keep the activation alive.
        self._tensor: Tensor | None = tensor
        self._name = name
        self._region: Region | None = None
        if offload and self._enabled and self.engine is not None:
            self._region = self.engine.region(name, self._occurrences[name])
            self._occurrences[name] += 1

    def __enter__(self) -> Tensor:
        tensor, self._tensor = self._tensor, None
        assert tensor is not None, "a region is entered once"
        if self._region is not None:
            self._region.__enter__()
        return tensor

    def __exit__(self, *error: Any) -> None:
        if self._region is not None:
            self._region.__exit__(*error)

    def group_offload(self, tensor: Any, forced_released_tensors: Any = None, delay_offload: bool = False) -> Any:
        """Start offloading what the region saved; returns `tensor` (a tensor, or a sequence that begins with one)."""
        region, self._region = self._region, None
        if region is None:
            return tensor
        assert self.engine is not None
        follower = _READS_OUTPUT_OF.get(self._name)
        later = [tensor] if follower in self.modules else []
        return self.engine.commit(region, tensor, later=later)

    @classmethod
    def init_chunk_handler(cls, *_args: Any, **_kwargs: Any) -> None:
        """A model forward begins. The engine needs no count of them; only the names of regions start anew."""
        cls._occurrences.clear()

    @classmethod
    def mark_not_offload(cls, tensor: Tensor | None) -> None:
        """Never offload anything on this tensor's storage."""
        if cls.engine is not None and tensor is not None:
            cls.engine.exclude([tensor])

    @classmethod
    def reset(cls) -> None:
        """A schedule has ended."""
        if cls.engine is not None:
            cls.engine.end_step()

    @classmethod
    def disable_offload(cls) -> None:
        """Regions opened from here on do nothing."""
        cls._enabled = False

    @classmethod
    def enable_offload(cls) -> None:
        """Regions work again."""
        cls._enabled = True


def use_engine(engine: OffloadEngine | None, modules: Iterable[str] = ()) -> None:
    """Make `engine` the one that Megatron's layers use in this process; None turns offloading into a no-op.

    `modules` are the modules that will be offloaded.
    """
    original = getattr(megatron_offload, _CLASS_NAME)
    if original is not OffloadInterface:
        for name, module in list(sys.modules.items()):
            if name.startswith("megatron.") and module is not None:
                for attribute in [key for key, value in vars(module).items() if value is original]:
                    setattr(module, attribute, OffloadInterface)
    OffloadInterface.engine, OffloadInterface.modules = engine, frozenset(modules)


def exclude_parameters(engine: OffloadEngine, modules: Iterable[torch.nn.Module]) -> None:
    """Tell the engine which storages stay on the device: parameters and buffers of models (without wrappers)."""
    for module in modules:
        engine.exclude([*module.parameters(), *module.buffers()])
