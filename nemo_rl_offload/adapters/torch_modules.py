"""Offloading for any torch model: each listed module's saved tensors go to the engine.

A region of the engine is open while a listed module is called, or for a part of the call: `core_attn` is attention
without its projections, and ends where `o_proj` begins. Regions nest, and the innermost gets what is saved.

Gradient checkpointing: what it keeps, the inputs of layers, is offloaded by listing the layers. Parts of such a layer
save nothing in the forward with `use_reentrant=True`, and what recomputing saves is needed at once and stays. Otherwise
a part goes to the host in the forward, and the one layer that is recomputed at a time becomes smaller by it.
"""

import threading
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from nemo_rl_offload.adapters.call_hooks import Around, Running, is_watched, unwatch, watch
from nemo_rl_offload.adapters.module_resolver import Site, Target, names_in, resolve
from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.offload.backends.base import Backend
from nemo_rl_offload.offload.backends.cuda import CudaBackend
from nemo_rl_offload.offload.backends.host import HostBackend
from nemo_rl_offload.offload.engine import OffloadEngine, Region
from nemo_rl_offload.offload.host_memory import host_memory_budget_bytes
from nemo_rl_offload.offload.options import OffloadOptions, build_engine
from nemo_rl_offload.offload.saved_hooks import remove_left_hooks
from nemo_rl_offload.offload.stats import OffloadStats
from nemo_rl_offload.units import human_bytes, parse_bytes


def offload_activations(
    model: nn.Module,
    modules: Sequence[str],
    *,
    host_memory_budget: float | str = 0.5,
    min_tensor_bytes: int = 1 << 20,
    gpu_memory_budget: str | None = None,
) -> "ActivationOffload":
    """Keep what `modules` save for the backward pass in host memory until it is needed.

    In effect at once, until the result is closed or left as a context manager. Gradients stay bit for bit the same.
    The model itself is not changed in any way.

    Args:
        model: any module, with its parameters on one device, a CUDA device or the CPU.
        modules: Megatron's names (see `families.NAMES`) or paths of modules ("encoder.layers.*"; `*` stands for any
            part of one step, `**` for any number of steps). A path may name a compiled module, not one inside of it.
            Or "auto": from the first step's measurements on, just as many of all named modules' groups as
            `gpu_memory_budget` asks for; then call `end_step` after each training step.
        host_memory_budget: the most host memory to take: a size ("32GiB"), or a share of the node's free memory,
            divided by the ranks on the node. What does not fit stays on the device and is counted as denied.
        min_tensor_bytes: a smaller tensor stays on the device.
        gpu_memory_budget: device memory for everything that is in the peak, weights too ("72GiB"); with "auto" only.

    Raises:
        ConfigError: the modules are not there, cannot be told apart, or are offloaded already; the parameters are on
            several devices or on one that is not supported; the budget is no budget; a size is no number.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model is a {type(model).__name__}: give a torch.nn.Module")
    if gpu_memory_budget is not None and not isinstance(gpu_memory_budget, str):
        raise ConfigError(f"gpu_memory_budget={gpu_memory_budget!r}: give a size with its unit, like '72GiB'")
    if (modules == "auto") != (gpu_memory_budget is not None):
        raise ConfigError("modules='auto' and gpu_memory_budget (like '72GiB') need each other: give both or neither")
    if not isinstance(min_tensor_bytes, int) or min_tensor_bytes < 0:
        raise ConfigError(f"min_tensor_bytes={min_tensor_bytes!r}: give a number of bytes from 0 on, like 1 << 20")
    return ActivationOffload(model, modules, host_memory_budget, min_tensor_bytes, gpu_memory_budget)


class ActivationOffload:
    """Offloading that is in effect; see `offload_activations`."""

    def __init__(
        self,
        model: nn.Module,
        modules: Sequence[str],
        host_memory_budget: float | str,
        min_tensor_bytes: int,
        gpu_memory_budget: str | None,
    ) -> None:
        targets = resolve(model, names_in(model) if modules == "auto" else modules)
        options = OffloadOptions(
            modules="auto" if gpu_memory_budget is not None else [target.entry for target in targets],
            host_memory_budget_bytes=host_memory_budget_bytes(host_memory_budget),
            gpu_memory_budget_bytes=None if gpu_memory_budget is None else parse_bytes(gpu_memory_budget),
            min_tensor_bytes=min_tensor_bytes,
        )
        self._engine = build_engine(options, _backend(model))
        self._is_auto, self._is_closed = gpu_memory_budget is not None, False
        self._engine.exclude([*model.parameters(), *model.buffers()])
        self._min_tensor_bytes = min_tensor_bytes
        self._usage = {target.entry: _Usage() for target in targets}
        self._watches = ExitStack()
        try:
            for site, arounds in self._arounds(targets):
                if is_watched(site.module, site.method):
                    raise ConfigError(
                        f"{site.path} is offloaded already. Close what offload_activations returned before, or list "
                        "all modules in one call."
                    )
                if site.module is model:
                    arounds = (_Beginning(self._engine), *arounds)
                self._watches.callback(unwatch, site.module, site.method, arounds)
                watch(site.module, site.method, arounds)
            if not is_watched(model, "__call__"):
                beginning = (_Beginning(self._engine),)
                self._watches.callback(unwatch, model, "__call__", beginning)
                watch(model, "__call__", beginning)
        except BaseException:
            self._watches.close()
            raise

    def __enter__(self) -> Self:
        if self._is_closed:
            raise ConfigError("this offloading has ended. Call offload_activations again.")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._release()

    def end_step(self) -> None:
        """Say that a training step, with all its microbatches, is over. Without it, a step is taken to end whenever no
        graph is alive, which for gradient accumulation is after each microbatch."""
        self._engine.end_step()

    def stats(self) -> OffloadStats:
        """Totals since the beginning, in bytes and counts; also after `close`."""
        return self._engine.stats()

    def close(self) -> None:
        """End offloading; twice does no harm. A graph that may still have a backward keeps what it has on the host, and
        the host memory with it; close again when it is gone to give the memory back at once.

        Warns of listed modules that offloaded nothing.
        """
        for entry, usage in self._usage.items():
            if not self._is_auto and (reason := self._why_idle(entry, usage)) is not None:
                message = f"offload_activations: '{entry}' offloaded nothing: {reason}"
                warnings.warn(message, skip_file_prefixes=(str(Path(__file__).parent),))
        self._usage = {}
        self._release()

    def _release(self) -> None:
        self._is_closed = True
        self._watches.close()
        self._engine.stats()
        if not self._engine._slots:  # no graph is left that the engine would have to serve
            self._engine.close()

    def _arounds(self, targets: list[Target]) -> Iterator[tuple[Site, tuple[Around[Any], ...]]]:
        """What goes around each site's calls: outermost first, the end of an enclosing region before the next one."""
        sites: dict[tuple[int, str], Site] = {}
        borders: defaultdict[tuple[int, str], list[Around[Any]]] = defaultdict(list)
        wholes: defaultdict[tuple[int, str], list[Around[Any]]] = defaultdict(list)
        parts: defaultdict[tuple[int, str], list[Around[Any]]] = defaultdict(list)
        listed = {target.site.key for target in targets}
        for target in targets:
            span = _Span(self._engine, target, self._usage[target.entry])
            sites |= {site.key: site for site in (target.site, *target.without, *([target.end] if target.end else []))}
            (parts if target.end else wholes)[target.site.key].append(_Whole(span))
            for site in target.without:
                borders[site.key].append(_StepOut(span))
            if target.end:
                is_saved_again = target.end.key in listed or _is_trained(target.end.module)
                borders[target.end.key].append(_Finish(span, is_saved_again))
        for key, site in sites.items():
            yield site, (*borders[key], *wholes[key], *parts[key])

    def _why_idle(self, entry: str, usage: "_Usage") -> str | None:
        stats = self._engine.stats()
        if (entry in stats.per_module and stats.per_module[entry].bytes_out > 0) or stats.denied_bytes > 0:
            return None
        if not usage.called:
            return (
                "no such module was called. Either the model was not, or something takes its weight instead (TRL's "
                "losses, that of lm_head), or all of it is inside of compiled code (compile the modules that you list, "
                "or less)."
            )
        if usage.unknown_output is not None:
            return (
                f"it returned a {usage.unknown_output} in which no tensor that needs a gradient was found. Tensors are "
                "looked for in tuples, lists, dicts and dataclasses, and in what torch.utils._pytree knows."
            )
        if not usage.called_in_forward and usage.called_in_backward:
            return (
                "gradient checkpointing with use_reentrant=True recomputes it just before its backward. List the "
                "checkpointed layers themselves, or set use_reentrant=False."
            )
        if usage.called_in_forward and entry in self._engine.kept_types:
            kind = self._engine.kept_types[entry]
            return f"what it saved is a {kind}, and only plain tensors are moved. List parts that compute without it."
        if entry in stats.per_module and (small_bytes := stats.per_module[entry].small_bytes):
            return (
                f"the tensors that it saved, {human_bytes(small_bytes)} in all, are each below "
                f"min_tensor_bytes={self._min_tensor_bytes}. Lower that where they are worth the copies."
            )
        if usage.called_in_forward:
            return (
                f"it saved no tensor of at least min_tensor_bytes={self._min_tensor_bytes} that is not a parameter "
                "or saved by another listed module."
            )
        return None


class _Usage:
    """Where a listed module was called; the latter two with gradients."""

    called = False
    called_in_forward = False
    called_in_backward = False
    unknown_output: str | None = None
    """Type of what it returned, where it saved tensors and no tensor was found in that."""


class _Open:
    """A call of a target: its region, and whether tensors go there now."""

    __slots__ = ("is_inside", "region")

    def __init__(self, region: Region) -> None:
        self.region = region
        self.is_inside = False

    def go_in(self) -> None:
        self.is_inside = True
        remove_left_hooks()
        self.region.push_hooks()

    def go_out(self) -> None:
        if self.is_inside:
            self.region.remove_hooks()
            self.is_inside = False


class _Span:
    """A target's region: opened by `_Whole`, left for the time of `_StepOut`, committed by `_Finish` or the end."""

    def __init__(self, engine: OffloadEngine, target: Target, usage: _Usage) -> None:
        self.engine = engine
        self._target = target
        self._usage = usage
        self._threads = threading.local()

    def open(self, running: Running) -> _Open | None:
        """The call of a target begins; None without grad."""
        self._usage.called = True
        if not torch.is_grad_enabled():
            return None
        if (transform := _transform()) is not None:
            raise ConfigError(
                f"{self._target.site.path}: called inside of {transform}, which has no hooks for saved tensors. End "
                "offloading before (close), or use loss.backward() or torch.autograd.grad instead."
            )
        if torch._C._current_graph_task_id() == -1:
            self._usage.called_in_forward = True
        else:
            self._usage.called_in_backward = True
        region = self.engine.region(self._target.entry, self._target.site.path)
        region.open = running
        current = _Open(region)
        self._stack().append(current)
        return current

    def close(self, current: _Open) -> None:
        """It has ended, or failed; twice does no harm."""
        current.go_out()
        stack = self._stack()
        if stack and stack[-1] is current:
            stack.pop()

    def commit(self, region: Region, output: object, later: bool = False) -> None:
        tensor = _first_differentiable(output)
        if tensor is not None:
            self.engine.commit(region, tensor, later=[tensor] if later else [])
        elif region._slots:
            self._usage.unknown_output = type(output).__name__

    def current(self) -> _Open | None:
        """The innermost call in this thread."""
        stack = self._stack()
        while stack and not stack[-1].region.open.locked():  # left by an interrupt
            stack.pop()
        return stack[-1] if stack and torch.is_grad_enabled() else None

    def _stack(self) -> list[_Open]:
        stack: list[_Open] = self._threads.__dict__.setdefault("stack", [])
        return stack


class _Beginning:
    """Around the whole model: each of its forwards is told of."""

    def __init__(self, engine: OffloadEngine) -> None:
        self._engine = engine

    def enter(self, running: Running, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
            self._engine.begin_forward()

    def leave(self, entered: None, output: object) -> None:
        pass

    def fail(self, entered: None) -> None:
        pass


class _Whole:
    """Around a target: its region is open, and committed at the end."""

    def __init__(self, span: _Span) -> None:
        self._span = span

    def enter(self, running: Running, args: object, kwargs: object) -> _Open | None:
        current = self._span.open(running)
        if current is not None:
            try:
                current.go_in()
            except BaseException:
                self.fail(current)
                raise
        return current

    def leave(self, entered: _Open | None, output: object) -> None:
        if entered is not None:
            self._span.close(entered)
            self._span.commit(entered.region, output)

    def fail(self, entered: _Open | None) -> None:
        if entered is not None:
            self._span.close(entered)


class _StepOut:
    """Around a part that does not belong to the target: its region is left for this time."""

    def __init__(self, span: _Span) -> None:
        self._span = span

    def enter(self, running: Running, args: object, kwargs: object) -> _Open | None:
        current = self._span.current()
        if current is None or not current.is_inside:
            return None
        current.go_out()
        return current

    def leave(self, entered: _Open | None, output: object) -> None:
        if entered is not None and not entered.is_inside:
            entered.go_in()

    def fail(self, entered: _Open | None) -> None:
        self.leave(entered, None)


class _Finish:
    """Around what follows on a target inside of its call: its region ends here."""

    def __init__(self, span: _Span, is_saved_again: bool) -> None:
        self._span = span
        self._is_saved_again = is_saved_again

    def enter(self, running: Running, args: object, kwargs: object) -> None:
        # Attention saves its own output, and `o_proj` saves the same storage: to copy it here would free nothing.
        current = self._span.current()
        if current is not None:
            current.go_out()
            self._span.commit(current.region, (args, kwargs), later=self._is_saved_again)

    def leave(self, entered: object, output: object) -> None:
        """Nothing is left to do."""

    def fail(self, entered: object) -> None:
        """Nothing is left to do."""


def _first_differentiable(output: object) -> Tensor | None:
    if isinstance(output, Tensor):
        return output if output.grad_fn is not None else None
    return next((tensor for tensor in _tensors(output) if tensor.grad_fn is not None), None)


def _tensors(output: object) -> Iterator[Tensor]:
    for leaf in tree_iter(output):
        if isinstance(leaf, Tensor):
            yield leaf
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            yield from _tensors([getattr(leaf, field.name) for field in fields(leaf)])


def _transform() -> str | None:
    """torch.func's innermost transform that is being run."""
    interpreter = torch._C._functorch.peek_interpreter_stack()
    return None if interpreter is None else f"torch.func.{interpreter.key().name.lower()}"


def _is_trained(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def _backend(model: nn.Module) -> Backend:
    devices = {parameter.device for parameter in model.parameters()} or {torch.device("cpu")}
    device, *others = devices
    if others or device.type not in ("cpu", "cuda"):
        names = ", ".join(sorted(map(str, devices)))
        raise ConfigError(f"The model is on {names}. Offloading works for a model on one CUDA device, or on the CPU.")
    return CudaBackend(device) if device.type == "cuda" else HostBackend()
