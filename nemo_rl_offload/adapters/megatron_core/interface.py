"""Puts this project's offload engine in the place of Megatron-Core's own.

Megatron's layers call one class, `FineGrainedActivationOffloadingInterface`, in a fixed way:
`manager = Interface(flag, tensor, module)`, `with manager as tensor: ...`, `output = manager.group_offload(output)`.
The class below has the same shape and hands regions to the engine. Several Megatron modules bind the class by name
when they are imported, and layers keep it when they are built; so it is replaced wherever it is bound, before any
layer is built. Since Megatron's contract is one class for the process, one engine is active in a process at a time.

`forced_released_tensors` are not shrunk. Megatron resizes their storage to nothing while other nodes may have saved
views of it: the value handed to core attention shares its storage with the query that a query norm saved. Our engine
lets go of its reference instead, and the memory is free when the layer's own frame ends.

A region may save its own output: attention does, and norms of queries and keys save a part of the projection's whole
output. The next module reads that output and saves it, too. It is left to that module, and counted as its where it is
listed; where it is not, a copy would free nothing. The shared experts' input is left to the router likewise.

A layer that is recomputed whole saves only its input, in a checkpoint around the layer, where Megatron has no region.
When `attn_norm` is listed, that checkpoint becomes a region of this name (`_OffloadedCheckpoints`): of all modules'
inputs, the layer's input is the one that `attn_norm` stands for without recomputation, too. A dense MLP that is
recomputed alone likewise saves its input, which is `mlp_norm`'s, or `mlp_fc1`'s where norm and linear are one kernel.

A CUDA graph may not contain an offloaded module with this engine, since a captured copy would read and write the same
host memory at every replay; the configuration's rules refuse that. For graphs that do not contain one, replaying gives
the host time to issue copies of other modules then, which Megatron asks for by `delay_offload`.
"""

import sys
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from typing import Any, ClassVar

import torch
from megatron.core import recompute, tensor_parallel
from megatron.core.pipeline_parallel import fine_grained_activation_offload as megatron_offload
from megatron.core.transformer import multi_token_prediction, transformer_layer
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from nemo_rl_offload.adapters.megatron_core.recomputed_inputs import save_inputs
from nemo_rl_offload.adapters.megatron_core.routing_result import bypass_copy_engine
from nemo_rl_offload.offload.engine import OffloadEngine, Region

_CLASS_NAME = "FineGrainedActivationOffloadingInterface"

# The router reads the shared experts' input after them, and saves it outside of every region.
_INPUT_IS_READ_ON = ("shared_experts",)


class OffloadInterface:
    """One occurrence of a module in a forward; Megatron's contract."""

    engine: ClassVar[OffloadEngine | None] = None
    modules: ClassVar[frozenset[str]] = frozenset()
    _enabled: ClassVar[bool] = True
    _is_inside: ClassVar[bool] = False
    """Of `no_regions`."""
    _occurrences: ClassVar[Counter[str]] = Counter()
    _vp_stage: ClassVar[int | None] = None
    _is_replaying: ClassVar[bool] = False
    _delayed: ClassVar[list[Callable[[], object]]] = []
    opened: ClassVar[set[str]] = set()
    """Modules that regions were opened of, since the engine was put here."""
    on_reset: ClassVar[Callable[[], None] | None] = None
    """Told when a schedule has ended."""
    on_reset_instance: ClassVar[Callable[[], None] | None] = None
    """Told when a program begins anew, with other models."""

    def __init__(self, offload: bool, tensor: Tensor, name: str) -> None:
        # The tensor is only lent: layers keep their manager, which must not keep the activation alive.
        self._tensor: Tensor | None = tensor
        self._name = name
        self._left: Tensor | None = None
        self._region: Region | None = None
        if offload and self._enabled and not self._is_inside and self.engine is not None and torch.is_grad_enabled():
            self._region = self.engine.region(name, self._layer())
            self._occurrences[name] += 1
            self.opened.add(name)

    def _layer(self) -> int | str:
        number = self._occurrences[self._name]
        return number if self._vp_stage is None else f"{self._vp_stage}.{number}"

    def __enter__(self) -> Tensor:
        tensor, self._tensor = self._tensor, None
        assert tensor is not None, "a region is entered once"
        if self._region is not None:
            self._left = tensor if self._name in _INPUT_IS_READ_ON else None
            self._region.enter(sys._getframe(1))
        return tensor

    def __exit__(self, *error: Any) -> None:
        if self._region is not None:
            self._region.__exit__(*error)

    def group_offload(self, tensor: Any, forced_released_tensors: Any = None, delay_offload: bool = False) -> Any:
        """Start offloading what the region saved; returns `tensor` (a tensor, or a sequence that begins with one).

        With `delay_offload`, inside the replay of a CUDA graph, it starts when the graph has been launched.
        """
        region, self._region = self._region, None
        left, self._left = self._left, None
        if region is None:
            return tensor
        assert self.engine is not None
        outputs = [tensor] if isinstance(tensor, Tensor) else tensor
        later = [each for each in (*outputs, left) if isinstance(each, Tensor)]
        if delay_offload and self._is_replaying:
            self._delayed.append(partial(self.engine.commit, region, tensor, later=later))
            return tensor
        return self.engine.commit(region, tensor, later=later)

    @classmethod
    def init_chunk_handler(
        cls, pp_rank: int, vp_size: int | None, vp_stage: int | None, *_: object, **_kwargs: object
    ) -> None:
        """A forward of a model chunk begins. Regions are counted anew, and are told apart by their virtual stage.

        What Megatron passes besides, this project's engine was given when it was built.
        """
        cls._occurrences.clear()
        cls._vp_stage, cls._is_inside = vp_stage, False  # an interrupt may have left it
        if cls.engine is not None:
            cls.engine.begin_forward()

    @classmethod
    def mark_not_offload(cls, tensor: Tensor | None) -> None:
        """Never offload anything on this tensor's storage."""
        if cls.engine is not None and tensor is not None:
            cls.engine.exclude([tensor])

    @classmethod
    def reset(cls) -> None:
        """A schedule has ended."""
        cls._delayed.clear()
        if cls.engine is not None:
            cls.engine.end_step()
        if cls.on_reset is not None:
            cls.on_reset()

    @classmethod
    def reset_instance(cls) -> None:
        """Forget what the last forward left; the engine stays."""
        cls._occurrences.clear()
        cls._delayed.clear()
        cls._enabled, cls._is_replaying, cls._vp_stage = True, False, None
        if cls.on_reset_instance is not None:
            cls.on_reset_instance()

    @classmethod
    def disable_offload(cls) -> None:
        """Regions opened from here on do nothing."""
        cls._enabled = False

    @classmethod
    def enable_offload(cls) -> None:
        """Regions work again."""
        cls._enabled = True

    @classmethod
    def enter_replay(cls) -> None:
        """The replay of a layer's CUDA graph begins."""
        cls._is_replaying = True

    @classmethod
    def exit_replay(cls) -> None:
        """It has ended."""
        cls._is_replaying = False

    @classmethod
    def flush_delayed_groups(cls) -> None:
        """A graph has been launched: start the copies that were put off until now, in the order of their commits."""
        while cls._delayed:
            cls._delayed.pop(0)()

    @staticmethod
    def get_context(flag: bool) -> AbstractContextManager[None]:
        """Regions carry their hooks themselves; there are none to open around several of them."""
        return nullcontext()

    @staticmethod
    @cache
    def cuda_graph_stream() -> Any:
        """The stream on which graphs that contain an offloaded module would be replayed."""
        return torch.cuda.Stream()  # type: ignore[no-untyped-call]

    @staticmethod
    @cache
    def cuda_graph_event() -> Any:
        """The event by which other streams would wait for such a graph."""
        return torch.cuda.Event(external=True)  # type: ignore[no-untyped-call]

    @classmethod
    def forward_record(cls) -> None:
        """Mark the end of a captured forward. No copy is captured, so there is none to wait for."""
        torch.cuda.current_stream().record_event(cls.cuda_graph_event())

    @classmethod
    def backward_record(cls, tensor: Tensor) -> Tensor:
        """Mark the end of a captured backward, which reaches `tensor` last."""
        if tensor.requires_grad:
            tensor.register_hook(lambda _: cls.forward_record())  # type: ignore[no-untyped-call]
        return tensor


class _OffloadedCheckpoints(types.ModuleType):
    """`tensor_parallel` as recomputation sees it: a checkpoint is a region of the module that names its input."""

    def __init__(self, name_of: Callable[[Callable[..., object]], str | None]) -> None:
        super().__init__("tensor_parallel")
        self._name_of = name_of

    def __getattr__(self, name: str) -> Any:
        return getattr(tensor_parallel, name)

    def checkpoint(self, function: Callable[..., Any], distribute_saved_activations: bool, *args: Any) -> Any:
        name = self._name_of(function)
        if name is None:
            return tensor_parallel.checkpoint(function, distribute_saved_activations, *args)
        for constant in args:  # rotary tables and masks, which the checkpoint saves with the activations
            if isinstance(constant, Tensor) and not constant.requires_grad:
                OffloadInterface.mark_not_offload(constant)
        region = OffloadInterface(name in OffloadInterface.modules, args[0], name)
        with region:
            output = tensor_parallel.checkpoint(function, distribute_saved_activations, *args)
        return region.group_offload(output)


def _input_of_mlp(function: Callable[..., object]) -> str | None:
    """Megatron's layers call their dense MLP through a `partial`, and other parts by functions of their own."""
    mlp = function.func if isinstance(function, partial) else None
    return getattr(mlp, "input_module", "mlp_norm") if isinstance(mlp, MLP) else None


def offload_region(config: TransformerConfig, tensor: Tensor, module: str | None, training: bool) -> Any:
    """A region manager of whichever engine is installed; one that does nothing when `module` is not listed."""
    listed = config.fine_grained_activation_offloading and module in config.offload_modules
    return bound_interface()(listed and training, tensor, module)


@contextmanager
def no_regions() -> Iterator[None]:
    """Leave to whoever is around it what a part of a layer saves, whose own regions stay closed."""
    was_inside, OffloadInterface._is_inside = OffloadInterface._is_inside, True
    try:
        yield
    finally:
        OffloadInterface._is_inside = was_inside


def bound_interface() -> Any:
    """The class that Megatron's modules open regions with now."""
    return getattr(megatron_offload, _CLASS_NAME)


MEGATRONS_INTERFACE = bound_interface()
"""Megatron-Core's own class."""
_ASKED_FOR = ("OffloadInterface", "MEGATRONS_INTERFACE")


def bind_interface(interface: Any) -> None:
    """Let modules open regions with this class: Megatron's and whoever else has imported the present one from there.

    A module that has a class by the name that it has here has asked for it, and keeps it.
    """
    current = bound_interface()
    for name, module in list(sys.modules.items()):
        if isinstance(module, types.ModuleType) and not name.startswith("nemo_rl_offload."):
            for attribute in [key for key, value in vars(module).items() if value is current]:
                if attribute not in _ASKED_FOR:
                    setattr(module, attribute, interface)


def use_engine(engine: OffloadEngine | None, modules: Iterable[str] = ()) -> None:
    """Make `engine` the one that Megatron's layers use in this process; None turns offloading into a no-op.

    `modules` are the modules that will be offloaded.
    """
    if bound_interface() is not OffloadInterface:
        bind_interface(OffloadInterface)
        for module in (recompute, multi_token_prediction):
            module.tensor_parallel = _OffloadedCheckpoints(lambda _: "attn_norm")
        transformer_layer.tensor_parallel = _OffloadedCheckpoints(_input_of_mlp)
    OffloadInterface.engine, OffloadInterface.modules = engine, frozenset(modules)
    OffloadInterface.on_reset = OffloadInterface.on_reset_instance = None
    OffloadInterface.opened.clear()
    bypass_copy_engine(engine is not None and engine.device.type == "cuda")
    save_inputs(engine is not None)


def restore_megatrons() -> None:
    """Let Megatron's modules use Megatron's engine again. Layers that were built before keep this class, without an
    engine."""
    use_engine(None)
    OffloadInterface.reset_instance()
    bind_interface(MEGATRONS_INTERFACE)
    for module in (recompute, multi_token_prediction, transformer_layer):
        module.tensor_parallel = tensor_parallel


@contextmanager
def forward_only(config: TransformerConfig) -> Iterator[None]:
    """Keep a phase without backward, of models with this TransformerConfig, from an offload engine.

    Ours needs no telling. Megatron-Core's takes every forward for one whose backward will come: a forward-only pass
    before the first training step ends in an assertion, or halves what is offloaded for good.
    """
    engine = getattr(megatron_offload, _CLASS_NAME)
    if engine is OffloadInterface or not config.fine_grained_activation_offloading:
        yield
        return
    config.fine_grained_activation_offloading = False
    engine.disable_offload()
    try:
        yield
    finally:
        engine.enable_offload()
        config.fine_grained_activation_offloading = True


def exclude_parameters(engine: OffloadEngine, modules: Iterable[torch.nn.Module]) -> None:
    """Tell the engine which storages stay on the device: parameters and buffers of models (without wrappers)."""
    for module in modules:
        engine.exclude([*module.parameters(), *module.buffers()])
