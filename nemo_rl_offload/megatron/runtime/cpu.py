"""Lets megatron-core 0.19.2 run on a machine without CUDA, over gloo.

Megatron names CUDA in a handful of places although the mathematics around them is device-neutral. Each function below
redirects one such place, and says which line needs it. They act on the whole process and are installed once, in a
worker, before Megatron is imported and only where `torch.cuda.is_available()` is false. The alternative, a fork of
Megatron, would follow every release; the limit of this one is that a new release can add another place, which then
fails loudly ("Torch not compiled with CUDA enabled") in the tests that train a model.
"""

import contextlib
import importlib
import importlib.util
import logging
import sys
import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nemo_rl_offload.megatron.runtime.optional_packages import TRANSFORMER_ENGINE_PACKAGES, leave_out_broken_packages

_CPU = torch.device("cpu")
_installed = False


def install_cpu_support() -> bool:
    """Apply every redirection once. Returns whether this process runs Megatron on the CPU.

    With a GPU or without, optional packages that do not import are left out.
    """
    global _installed
    if torch.cuda.is_available():
        leave_out_broken_packages()
        return False
    if not _installed:
        _installed = True
        hide_transformer_engine()
        leave_out_broken_packages()
        for redirect in (_device, _rng, _streams, _factories, _types, _moe_splits, _uneven_parts, _checkpoint_fp8):
            redirect()
    return True


class _Event:
    def __init__(self, *_args: object, **_kwargs: object) -> None: ...
    def record(self, stream: object = None) -> None: ...
    def wait(self, stream: object = None) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True

    def elapsed_time(self, _other: object) -> float:
        return 0.0


class _Stream:
    device = _CPU
    cuda_stream = 0

    def __init__(self, *_args: object, **_kwargs: object) -> None: ...
    def wait_stream(self, _stream: object) -> None: ...
    def wait_event(self, _event: object) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True

    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()


def hide_transformer_engine() -> None:
    """Make it as though Transformer Engine were not installed, for what is imported from now on.

    Megatron would take its optimizers, which want a GPU (optimizer/__init__.py:14).
    """
    installed = [name for name in TRANSFORMER_ENGINE_PACKAGES if importlib.util.find_spec(name)]
    for name in [name for name in sys.modules if name.split(".")[0] in installed]:
        del sys.modules[name]
    sys.modules |= dict.fromkeys(installed)  # type: ignore[arg-type]


def _device() -> None:
    """`device=torch.cuda.current_device()` stands all over Megatron (rotary_pos_embedding.py:162)."""
    torch.cuda.current_device = lambda: _CPU  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda device=None: None  # batched p2p, checkpoint save
    # Saving the distributed optimizer gathers over its group on "the device" (distrib_optimizer.py:1374).
    torch.Tensor.cuda = lambda self, *_args, **_kwargs: self  # type: ignore[method-assign]


def _rng() -> None:
    """Megatron keeps random states on the device (tensor_parallel/random.py:303); here that is the CPU generator."""
    from megatron.core.tensor_parallel import random as megatron_random

    def get_state(device: object = "cuda", clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(new_state: torch.Tensor, device: object = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(new_state)

    megatron_random._get_cuda_rng_state = get_state
    megatron_random._set_cuda_rng_state = set_state
    torch.cuda.get_rng_state = torch.cuda.random.get_rng_state = get_state
    torch.cuda.set_rng_state = torch.cuda.random.set_rng_state = set_state
    torch.cuda.manual_seed = torch.cuda.random.manual_seed = torch.default_generator.manual_seed  # type: ignore[assignment]
    # The tracker forks what it takes for a CUDA state, sees that the CPU state moved, and warns each time.
    logging.getLogger(megatron_random.__name__).addFilter(
        lambda record: not str(record.msg).startswith("CPU RNG state changed")
    )


def _streams() -> None:
    """Side streams of the MoE dispatcher (token_dispatcher.py:469) and of gradient buffers: one queue, in order."""
    stream = _Stream()
    torch.cuda.Stream = _Stream  # type: ignore[assignment,misc]
    torch.cuda.Event = _Event  # type: ignore[assignment,misc]
    torch.cuda.current_stream = lambda device=None: stream  # type: ignore[assignment,return-value]
    torch.cuda.default_stream = lambda device=None: stream  # type: ignore[assignment,return-value]
    torch.cuda.stream = lambda stream: contextlib.nullcontext()  # type: ignore[assignment,return-value]
    torch.Tensor.record_stream = lambda self, stream: None  # type: ignore[method-assign,assignment]


class _TorchWithoutCuda(types.ModuleType):
    """`torch` as some Megatron modules see it: `device="cuda"` in the two factories they use is the CPU, unpinned."""

    def __getattr__(self, name: str) -> object:
        return getattr(torch, name)

    @staticmethod
    def zeros(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(*args, device=_CPU if str(device).startswith("cuda") else device, **kwargs)

    @staticmethod
    def tensor(*args: Any, device: Any = None, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return torch.tensor(*args, **kwargs, device=_CPU if str(device).startswith("cuda") else device)  # type: ignore[misc]


def _factories() -> None:
    """`torch.zeros(..., device="cuda")`, `torch.tensor(..., device="cuda")` (schedules.py:749, optimizer.py:698), and
    `pin_memory=True` (rope_utils.py:59).

    Not in `torch` itself: there it would break `with torch.device(...)`, by which transformers builds its models.
    """
    for name in (
        "utils",
        "pipeline_parallel.schedules",
        "optimizer.optimizer",
        "optimizer.clip_grads",
        "distributed.param_and_grad_buffer",
        "dist_checkpointing.strategies.state_dict_saver",
        "models.common.embeddings.rope_utils",
    ):
        importlib.import_module(f"megatron.core.{name}").torch = _TorchWithoutCuda("torch")  # type: ignore[attr-defined]


def _types() -> None:
    """Optimizers ask for the exact name `torch.cuda.FloatTensor` (clip_grads.py:174, distrib_optimizer.py:401)."""
    original = torch.Tensor.type

    def cuda_type(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None and self.device.type == "cpu":
            return original(self).replace("torch.", "torch.cuda.", 1)
        return original(self, dtype, *args, **kwargs) if dtype is not None else original(self)

    torch.Tensor.type = cuda_type  # type: ignore[method-assign,assignment]


def _moe_splits() -> None:
    """All-to-all split sizes stay tensors on a CPU because moe_utils.py:1184 tests `is_cuda`; gloo wants numbers."""
    from megatron.core.transformer.moe import token_dispatcher

    original = token_dispatcher.maybe_move_tensor_to_cpu

    def move(tensor: object, as_numpy: bool = False, record_stream: bool = False) -> object:
        if as_numpy and torch.is_tensor(tensor) and not tensor.is_cuda:
            return tensor.numpy()
        return original(tensor, as_numpy, record_stream)

    token_dispatcher.maybe_move_tensor_to_cpu = move


def _uneven_parts() -> None:
    """Ranks that share experts' width gather what may be of different lengths (mappings.py:148) and add it up again in
    such parts (191); gloo does either for equal lengths alone."""
    from megatron.core.tensor_parallel import mappings

    gather_equal, reduce_equal = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def gather(
        part: Tensor, group: Any, output_split_sizes: Sequence[int] | None = None, use_global_buffer: bool = False
    ) -> Tensor:
        if output_split_sizes is None or group.size() == 1:
            return gather_equal(part, group, None, use_global_buffer)  # type: ignore[no-any-return]
        padded = part.new_zeros(max(output_split_sizes), *part.shape[1:])
        padded[: len(part)] = part
        parts = gather_equal(padded, group).chunk(group.size())
        return torch.cat([each[:size] for each, size in zip(parts, output_split_sizes, strict=True)])

    def reduce(
        parts: Tensor, group: Any, input_split_sizes: Sequence[int] | None = None, use_global_buffer: bool = False
    ) -> Tensor:
        if input_split_sizes is None or group.size() == 1:
            return reduce_equal(parts, group, None, use_global_buffer)  # type: ignore[no-any-return]
        summed = parts.clone()
        torch.distributed.all_reduce(summed, group=group)
        part: Tensor = torch.split(summed, list(input_split_sizes))[group.rank()]
        return part.clone()

    mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim = gather, reduce


def _checkpoint_fp8() -> None:
    """`CheckpointWithoutOutput(fp8=False)` takes False for fp8 and asks for Transformer Engine (random.py:693)."""
    from megatron.core.tensor_parallel.random import CheckpointWithoutOutput

    original = CheckpointWithoutOutput.__init__

    def init(self: CheckpointWithoutOutput, fp8: object = False) -> None:
        original(self, fp8=fp8)
        self.fp8 = bool(fp8)

    CheckpointWithoutOutput.__init__ = init
