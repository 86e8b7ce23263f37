"""Weights on their way from the ranks that train to those that generate, by Hugging Face's names.

Megatron-Bridge exports the training model weight by weight: all training ranks take part, and each sees every weight
whole. The first rank writes them into buckets, one stream of bytes cut every `BUCKET_BYTES`, so that a weight larger
than a bucket goes through several. A receiver puts each weight together again and, as soon as all weights are there
that one of its own parameters is made of (query, key and value of one layer, say), hands them to Bridge's mapping of
that parameter, which cuts out this rank's shard. So both sides may be laid out in any way, nobody holds more than a
bucket and the weights that cross its ends, and an engine that is no Megatron reads the same names.

Nothing rounds on the way: mappings only cut, join and move, and both models have the same types. A weight without a
name of Hugging Face's cannot travel, and is an error that names it instead of a model that quietly keeps an old one.

Three ways lead from one side to the other. A receiver beside each rank, on the same GPU, reads a `DeviceBucket` where
the rank has written it. Engines on other GPUs get the first rank's `SentBucket`s over a `weight_channel`. Everything
else goes through the first rank's host memory and Ray's store.

Rejected: rank to rank, by position (what this replaces) needs two equal layouts. Bridge's own `load_hf_weights` on a
bucket at a time builds its tasks anew for each. The limit: a bucket is read only when the one before has been loaded.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from nemo_rl_offload.cluster.worker_group import Stored
from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.megatron.build.vocabulary import exported_weights
from nemo_rl_offload.megatron.runtime.quiet import quiet
from nemo_rl_offload.specs.allocator import allocator_settings, expands, without_expanding
from nemo_rl_offload.specs.lora import is_adapter

if TYPE_CHECKING:
    from nemo_rl_offload.generation.weight_channel import WeightChannel
    from nemo_rl_offload.megatron.build.model import MegatronModel  # the driver does not import Megatron

BUCKET_BYTES = 64 << 20
DEVICE_BUCKET_BYTES = 256 << 20
SOURCE_RANK = 0


class Part(NamedTuple):
    """Bytes `begin` to `end` of a weight."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    begin: int
    end: int

    @property
    def num_bytes(self) -> int:
        """Of the whole weight."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class WeightBucket:
    """Parts of weights, and their bytes one after another, uint8 [bytes]."""

    parts: tuple[Part, ...]
    data: NDArray[np.uint8]


@dataclass(frozen=True)
class DeviceBucket:
    """Parts of weights, whose bytes stand in a buffer on a rank's GPU until the rank writes the next bucket there."""

    parts: tuple[Part, ...]
    handle: tuple[Callable[..., Tensor], tuple[Any, ...]]
    """What another process opens the buffer with (CUDA IPC), and its arguments; once, as torch counts its users."""

    @cached_property
    def data(self) -> Tensor:
        """The buffer, uint8 [bytes], of which the parts have the first."""
        function, arguments = self.handle
        return function(*arguments)


@dataclass(frozen=True)
class SentBucket:
    """Parts of weights whose bytes come over a channel, and the buffer where they arrive, uint8 [bytes]."""

    parts: tuple[Part, ...]
    data: Tensor


def num_bytes_of(parts: Iterable[Part]) -> int:
    """Of a bucket of these parts."""
    return sum(part.end - part.begin for part in parts)


class WeightSource(Protocol):
    """Whoever has the current weights."""

    def sent_weight_buckets(self) -> Iterator[tuple[Part, ...]]:
        """The parts of each bucket that is being sent over the channel; to be received before the next is asked for."""

    def weight_buckets(self) -> Iterator[Stored[WeightBucket]]:
        """All weights by Hugging Face's names, once. To be read to the end: ranks wait in it for each other."""

    def device_weight_buckets(self) -> Iterator[list[DeviceBucket]]:
        """The same on GPUs: each bucket once on each rank's, for a process beside it to read before the next comes."""


type Cut = list[tuple[Part, Tensor]]
"""Parts, each with its whole weight."""


def cut_into_buckets(weights: Iterable[tuple[str, Tensor]], bucket_bytes: int = BUCKET_BYTES) -> Iterator[Cut]:
    """Divide weights into lists of parts with `bucket_bytes` together; the last has fewer."""
    cut: Cut = []
    room = bucket_bytes
    for name, weight in weights:
        begin = 0
        while True:
            if room == 0:
                yield cut
                cut, room = [], bucket_bytes
            end = min(weight.nbytes, begin + room)
            cut.append((Part(name, tuple(weight.shape), weight.dtype, begin, end), weight))
            room -= end - begin
            begin = end
            if end == weight.nbytes:
                break
    if cut:
        yield cut


def pack(cut: Cut) -> WeightBucket:
    """Copy the parts into one array in host memory."""
    data = np.empty(num_bytes_of(part for part, _ in cut), dtype=np.uint8)
    offset = 0
    for part, weight in cut:
        end = offset + part.end - part.begin
        bytes_of_weight = weight.detach().contiguous().flatten().view(torch.uint8)
        data[offset:end] = bytes_of_weight[part.begin : part.end].cpu().numpy()
        offset = end
    return WeightBucket(tuple(part for part, _ in cut), data)


def pack_on_device(cut: Cut, buffer: Tensor) -> tuple[Part, ...]:
    """Copy the parts into the beginning of a buffer, uint8 [bytes]; they are there when this returns."""
    offset = 0
    for part, weight in cut:
        end = offset + part.end - part.begin
        buffer[offset:end] = weight.detach().contiguous().flatten().view(torch.uint8)[part.begin : part.end]
        offset = end
    if buffer.is_cuda:
        torch.cuda.synchronize()
    return tuple(part for part, _ in cut)


def device_buffer() -> Tensor:
    """For a bucket, uint8 [bytes]: on the GPU where there is one, in memory that other processes can open."""
    if not torch.cuda.is_available():
        return torch.empty(DEVICE_BUCKET_BYTES, dtype=torch.uint8)
    _, there = allocator_settings()
    if not expands(there):
        return torch.empty(DEVICE_BUCKET_BYTES, dtype=torch.uint8, device="cuda")
    set_allocator: Any = torch._C._accelerator_setAllocatorSettings
    set_allocator(without_expanding(there))
    try:
        return torch.empty(DEVICE_BUCKET_BYTES, dtype=torch.uint8, device="cuda")
    finally:
        set_allocator(there)


class Assembler:
    """Puts weights together whose parts come one after another, bucket by bucket."""

    def __init__(self) -> None:
        self._data = torch.empty(0, dtype=torch.uint8)

    def add(self, bucket: WeightBucket | DeviceBucket | SentBucket) -> Iterator[tuple[str, Tensor]]:
        """The weights that are whole now, each in memory of its own where the bucket is."""
        data, offset = bucket.data, 0
        for part in bucket.parts:
            if part.begin == 0:
                device = data.device if isinstance(data, Tensor) else None
                self._data = torch.empty(part.num_bytes, dtype=torch.uint8, device=device)
            end = offset + part.end - part.begin
            if isinstance(data, Tensor):
                self._data[part.begin : part.end] = data[offset:end]
            else:
                self._data.numpy()[part.begin : part.end] = data[offset:end]
            offset = end
            if part.end == part.num_bytes:
                yield part.name, self._data.view(part.dtype).view(part.shape)


class WeightExport:
    """One pass over a training model's weights. All ranks make it together, and take each bucket together.

    `on_device` buckets are for the process beside each rank, or for a channel.
    """

    def __init__(self, model: MegatronModel, *, on_device: bool = False) -> None:
        _, tasks = _conversion(model)
        with quiet():
            vocab_size: int = model.config.vocab_size
            weights = exported_weights(model.auto_bridge, model.modules, vocab_size, conversion_tasks=tasks)
        # Every rank sees the same weights: all cut at the same places, and stop in the same collective.
        self._cuts = cut_into_buckets(weights, DEVICE_BUCKET_BYTES if on_device else BUCKET_BYTES)
        self._buffer: Tensor | None = None
        if on_device:
            self._buffer = device_buffer()

    def next_device_bucket(self) -> DeviceBucket | None:
        """The next bucket on this rank's GPU, in place of the one before; None at the end."""
        assert self._buffer is not None, "made with on_device"
        with quiet():
            cut = next(self._cuts, None)
        if cut is None:
            self._buffer = None
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
            return None
        return DeviceBucket(pack_on_device(cut, self._buffer), reduce_tensor(self._buffer))  # type: ignore[no-untyped-call]

    def next_sent_bucket(self, channel: WeightChannel | None) -> tuple[Part, ...] | None:
        """Begin to send the next bucket, on the rank that has the channel's end; None at the end."""
        assert self._buffer is not None, "made with on_device"
        with quiet():
            cut = next(self._cuts, None)
        if channel is not None:
            channel.wait()
        if cut is None:
            self._buffer = None
            return None
        parts = tuple(part for part, _ in cut)
        if channel is not None:
            pack_on_device(cut, self._buffer)
            channel.send(self._buffer[: num_bytes_of(parts)])
        return parts

    def next_bucket(self) -> WeightBucket | None:
        """The next bucket on rank `SOURCE_RANK`, None elsewhere and at the end."""
        with quiet():
            cut = next(self._cuts, None)
        return None if cut is None or dist.get_rank() != SOURCE_RANK else pack(cut)


class WeightLoader:
    """Writes buckets into a model of any layout. All ranks load each bucket together, any number of updates.

    Raises:
        ConfigError: Bridge has no name for a weight.
    """

    def __init__(self, model: MegatronModel) -> None:
        self._model = model
        self._bridge, tasks = _conversion(model)
        self._tasks = [task for task in tasks if task.megatron_module is not None]
        self._assembler = Assembler()
        self._waiting: dict[str, Tensor] = {}
        self._start()

    def _start(self) -> None:
        self._open = list(self._tasks)
        self._num_users = Counter(name for task in self._tasks for name in _names(task))

    def load(self, bucket: WeightBucket) -> None:
        """Load what is whole with this bucket; the rest waits for the next."""
        self._waiting |= {name: weight for name, weight in self._assembler.add(bucket) if self._num_users[name]}
        still_open = []
        for task in self._open:
            if all(name in self._waiting for name in _names(task)):
                self._run(task)
            else:
                still_open.append(task)
        self._open = still_open

    def _run(self, task: Any) -> None:
        weights = self._bridge.maybe_modify_loaded_hf_weight(task.mapping.hf_param, self._waiting)
        shard = task.mapping.hf_to_megatron(weights, task.megatron_module)
        assert shard.shape == task.param_weight.shape, f"{task.param_name}: {shard.shape}, {task.param_weight.shape}"
        with torch.no_grad():
            task.param_weight.copy_(shard)
        for name in _names(task):
            self._num_users[name] -= 1
            if not self._num_users[name]:
                del self._waiting[name]

    def finish(self) -> None:
        """End an update.

        Raises:
            ConfigError: a weight has not come.
        """
        missing = [name for task in self._open for name in _names(task)]
        self._start()
        if missing:
            raise _cannot_travel(missing)
        self._bridge._broadcast_shared_embeddings(self._model.modules)  # to an output layer that is a copy of them


def _conversion(model: MegatronModel) -> tuple[Any, list[Any]]:
    """Bridge's converter of the model's family, and one task for each parameter and lasting buffer."""
    auto_bridge = model.auto_bridge
    converter = auto_bridge._model_bridge  # a new one at each access
    with quiet():
        built = converter.build_conversion_tasks(auto_bridge.hf_pretrained, model.modules)
    tasks = [task for task in built if task is not None]  # None: unmapped, here or on the rank that has it
    of_tasks = {id(task.param_weight) for task in tasks}
    unmapped = [
        name
        for chunk in model.modules
        for name, weight in chunk.state_dict(keep_vars=True).items()
        if isinstance(weight, Tensor) and id(weight) not in of_tasks and not _goes_without_saying(name, model)
    ]
    if unmapped:
        raise _cannot_travel(unmapped)
    return converter, tasks


def _goes_without_saying(name: str, model: MegatronModel) -> bool:
    """What Bridge leaves out with reason: Transformer Engine's state, an output layer tied to the embeddings, and
    adapters, which it merges into the weights."""
    return (
        "_extra_state" in name
        or is_adapter(name)
        or (model.config.share_embeddings_and_output_weights and name.startswith("output_layer."))
    )


def _names(task: Any) -> Sequence[str]:
    """The names of Hugging Face's that a parameter is made of."""
    names = task.mapping.hf_param
    return [names] if isinstance(names, str) else list(names.values())


def _cannot_travel(names: Sequence[str]) -> ConfigError:
    return ConfigError(
        f"policy.generation.colocated.enabled: {len(names)} weights of this model cannot be handed to workers apart, "
        f"since Megatron-Bridge does not convert them; the first are {', '.join(names[:3])}. Set it to true: then the "
        "training workers generate."
    )
