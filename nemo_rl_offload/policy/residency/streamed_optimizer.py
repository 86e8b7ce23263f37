"""A torch optimizer whose state waits in host memory and passes through the device, in buckets, while it steps.

Mechanism. A step reads a bucket from host memory, lets the optimizer update it on the device by its own kernel, and
writes it back; the bucket after it is read meanwhile and the one before it written, on the two lanes of the engine's
backend. The optimizer sees stand-ins: tensors of the bucket's part of each parameter, with their part of the gradient
and the state, in groups like its own. All that these optimizers do they do element by element, so the bits are those
of a step in one piece. What it counts (`step`) begins in every bucket from the same value.

Between steps the parameters and state that others see (a checkpoint, for one) are views of the host memory. Main
weights, float32 copies of the model's weights, wait there too, and the model's weights are written from a bucket while
it is on the device. A parameter that is a model's own stays there, and only its state moves.

Rejected: updating on the CPU (Megatron-Core's HybridDeviceOptimizer, DeepSpeed), whose arithmetic differs in the last
bit and takes many times as long; freeing and filling the storages of the tensors themselves, which cannot cut one.

Limits. Optimizers are known by class (`state_of`), and each must work element by element. The device needs room for
four buckets, and the host is waited for at the end of a step, so that whoever reads the host memory then reads what was
written last.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nemo_rl_offload.errors import ConfigError, ResourceError
from nemo_rl_offload.offload.arena import HostArena
from nemo_rl_offload.offload.backends.base import Block, Event, Extent
from nemo_rl_offload.policy.residency.slabs import LEAST_SLAB, Bucket, Segment, choose, cut, pack
from nemo_rl_offload.units import human_bytes

BUCKET_BYTES = 256 << 20
MAIN = "main weights"
"""Beside the names of an optimizer's state."""

type Layout = tuple[tuple[str, torch.dtype], ...]
"""What is kept for each element of a parameter."""


@dataclass(frozen=True, eq=False)
class Parameter:
    """One of the optimizer's parameters, which are on the device: [any shape], contiguous."""

    weight: Tensor
    group: int
    copied_to: Callable[[], Tensor] | None = None
    """Where these are main weights, the model's own, flat, of as many elements."""


@dataclass(frozen=True)
class _Slabs:
    """Parameters for which the same is kept, and their memory."""

    layout: Layout
    parameters: Sequence[Parameter]
    blocks: Sequence[Mapping[str, Block]]
    """Of each slab, by the name of what is kept."""
    homes: Sequence[Mapping[str, Tensor]]
    """Of each parameter, in its shape."""
    buckets: Sequence[Bucket]

    def transfer(self, bucket: Bucket) -> list[Block]:
        """A bucket's part of the slab's blocks."""
        parts = []
        for key, dtype in self.layout:
            extent, size = self.blocks[bucket.slab][key].pieces[0], dtype.itemsize
            num_bytes = (bucket.end - bucket.start) * size
            parts.append(Block((Extent(extent.slab, -1, bucket.start * size, num_bytes),), num_bytes))
        return parts


class _OnDevice(NamedTuple):
    """A bucket on its way through the device."""

    slabs: _Slabs
    bucket: Bucket
    blocks: list[Block]
    tensors: list[Tensor]
    arrival: Event


def state_of(optimizer: torch.optim.Optimizer, weight: Tensor) -> Layout:
    """What an optimizer keeps for each element of a parameter.

    Raises ConfigError for a class that is not known here, and for state in other formats than float32.
    """
    name = type(optimizer).__name__
    adam: Layout = (("exp_avg", torch.float32), ("exp_avg_sq", torch.float32))
    if isinstance(optimizer, torch.optim.Adam):  # AdamW is one
        return adam
    if isinstance(optimizer, torch.optim.SGD):
        return (("momentum_buffer", torch.float32),) if optimizer.defaults["momentum"] else ()
    if name == "FusedSGD":
        return (("momentum_buffer", torch.float32),)
    if name == "FusedAdam":
        kinds = {
            getattr(optimizer, f"{key}_dtype", torch.float32) for key in ("exp_avg", "exp_avg_sq", "master_weight")
        }
        if kinds != {torch.float32} or getattr(optimizer, "capturable", False):
            raise ConfigError(
                "policy.megatron_cfg.optimizer.optimizer_cpu_offload: Adam's state is float32 there, and no CUDA graph "
                "captures its step. Set it to false."
            )
        if not getattr(optimizer, "master_weights", False):
            return adam
        keeps_remainders = getattr(optimizer, "store_param_remainders", False) and weight.dtype == torch.bfloat16
        return (*adam, ("master_param", torch.int16 if keeps_remainders else torch.float32))
    raise ConfigError(
        f"policy.megatron_cfg.optimizer.optimizer_cpu_offload: not for the optimizer {name}. Set it to false."
    )


class StreamedOptimizer:
    """Moves what `optimizer` keeps for `parameters`, all of which are its own, to host memory, and takes the place of
    its `step` and `load_state_dict`. See the module's text for how.

    Args:
        optimizer: of a class that `state_of` knows; it may have stepped before.
        arena: the host memory, and by its backend the copies.
        parameters: those that may go.
        share: of their bytes, so many go, whole parameters at a time.
        bucket_bytes: what is read and written at a time.

    Raises:
        ConfigError: the arena's budget has no room, or the optimizer is not known; nothing has moved then.
        ResourceError: the system has refused host memory.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        arena: HostArena,
        parameters: Sequence[Parameter],
        *,
        share: float = 1.0,
        bucket_bytes: int = BUCKET_BYTES,
        least_slab: int = LEAST_SLAB,
    ) -> None:
        self._optimizer, self._arena, self._backend = optimizer, arena, arena.backend
        self._step, self._groups = optimizer.step, optimizer.param_groups
        layouts = [_layout(optimizer, parameter) for parameter in parameters]
        sizes = [
            parameter.weight.numel() * sum(dtype.itemsize for _, dtype in layout)
            for parameter, layout in zip(parameters, layouts, strict=True)
        ]
        by_layout: dict[Layout, list[Parameter]] = {}
        for number in choose(sizes, share):
            if sizes[number]:
                by_layout.setdefault(layouts[number], []).append(parameters[number])
        self._slabs = self._hold(by_layout, bucket_bytes, least_slab)
        self._of_weight = {
            id(parameter.weight): homes
            for slabs in self._slabs
            for parameter, homes in zip(slabs.parameters, slabs.homes, strict=True)
        }
        for weight in [weight for group in self._groups for weight in group["params"]]:
            self._begin(weight, self._of_weight.get(id(weight), {}))
        self._counted: dict[int, dict[str, Any]] = {}
        self._group_values: dict[int, dict[str, Any]] = {}
        optimizer.step = self.step  # type: ignore[method-assign, assignment]
        optimizer.load_state_dict = self.load_state_dict  # type: ignore[method-assign]

    @property
    def host_bytes(self) -> int:
        """Host memory that is held, padding included."""
        return sum(block.num_bytes for slabs in self._slabs for blocks in slabs.blocks for block in blocks.values())

    @property
    def main_weights(self) -> list[tuple[Tensor, Tensor]]:
        """Each parameter whose own values have gone, and the host memory that it is a view of between steps."""
        pairs = [pair for slabs in self._slabs for pair in zip(slabs.parameters, slabs.homes, strict=True)]
        return [(parameter.weight, homes[MAIN]) for parameter, homes in pairs if MAIN in homes]

    def _hold(self, by_layout: Mapping[Layout, list[Parameter]], bucket_bytes: int, least_slab: int) -> list[_Slabs]:
        packed = []
        needed_bytes = 0
        for layout, parameters in by_layout.items():
            lengths = [parameter.weight.numel() for parameter in parameters]
            places, slabs = pack(lengths, least_slab)
            each_bytes = sum(dtype.itemsize for _, dtype in layout)
            buckets = tuple(cut(places, lengths, slabs, bucket_bytes // each_bytes))
            needed_bytes += sum(slabs) * each_bytes
            packed.append((layout, parameters, places, slabs, buckets))
        if needed_bytes > self._arena.free_bytes:
            raise ConfigError(
                "policy.megatron_cfg.activation_offload.host_memory_budget: what optimizer_cpu_offload keeps on the "
                f"host needs {human_bytes(needed_bytes)} a rank, and {human_bytes(self._arena.free_bytes)} of "
                f"{human_bytes(self._arena.budget_bytes)} are free. Raise it, or lower "
                "optimizer.optimizer_offload_fraction."
            )
        return [self._hold_slabs(*each) for each in packed]

    def _hold_slabs(
        self, layout: Layout, parameters: Sequence[Parameter], places: Any, slabs: Sequence[int], buckets: Any
    ) -> _Slabs:
        blocks: list[dict[str, Block]] = []
        for num in slabs:
            blocks.append({})
            for key, dtype in layout:
                try:
                    block = self._arena.hold(num * dtype.itemsize)
                except MemoryError as error:
                    raise ResourceError(
                        f"policy.megatron_cfg.optimizer.optimizer_cpu_offload: {error}, after "
                        f"{human_bytes(self._arena.held_bytes)}. Lower optimizer.optimizer_offload_fraction."
                    ) from error
                assert block is not None, "there was room"
                blocks[-1][key] = block
        homes = []
        for parameter, place in zip(parameters, places, strict=True):
            shape, num, here = parameter.weight.shape, parameter.weight.numel(), blocks[place.slab]
            homes.append({key: _home(here[key], dtype, place.start, num).view(shape) for key, dtype in layout})
        return _Slabs(layout, parameters, blocks, homes, buckets)

    def _begin(self, weight: Tensor, homes: Mapping[str, Tensor]) -> None:
        """Bring what goes of a parameter to host memory. State that there is none of yet begins as zeros, everywhere:
        Megatron expects of all parameters or of none that there is some."""
        state = self._optimizer.state[weight]
        if isinstance(self._optimizer, torch.optim.Adam):
            state.setdefault("step", torch.tensor(0.0))
        for key, dtype in state_of(self._optimizer, weight):
            former = state.get(key)
            if former is None and key == "master_param" and dtype == torch.float32:
                former = weight.detach()
            state[key] = homes.get(key, former)
            if state[key] is None:
                state[key] = torch.zeros_like(weight, dtype=dtype)
            elif former is not None and state[key] is not former:
                state[key].copy_(former)
            elif former is None:
                state[key].zero_()
        if MAIN in homes:
            homes[MAIN].copy_(weight.detach())
            weight.data = homes[MAIN]

    @torch.no_grad()
    def step(self) -> None:
        """What the optimizer's own `step` does."""
        self._counted, self._group_values = {}, {}
        waiting = deque((slabs, bucket) for slabs in self._slabs for bucket in slabs.buckets)
        writing: deque[tuple[_OnDevice, Event]] = deque()
        try:
            reading = self._read(waiting)
            self._update_resident()
            while reading is not None:
                present, reading = reading, self._read(waiting)
                self._backend.compute_wait(present.arrival)
                self._update(present)
                moves = zip((tensor.untyped_storage() for tensor in present.tensors), present.blocks, strict=True)
                writing.append((present, self._backend.copy_out(list(moves))))
                if len(writing) > 1:
                    former, event = writing.popleft()
                    self._backend.compute_wait(event)  # before its memory is used again
                    del former
        finally:
            self._backend.synchronize()
        for number, values in self._group_values.items():
            self._groups[number].update(values)
        for slabs in self._slabs:
            for parameter in slabs.parameters:
                self._optimizer.state[parameter.weight].update(self._counted.get(id(parameter.weight), {}))

    def _read(self, waiting: deque[tuple[_Slabs, Bucket]]) -> _OnDevice | None:
        if not waiting:
            return None
        slabs, bucket = waiting.popleft()
        blocks = slabs.transfer(bucket)
        tensors, arrival = self._backend.copy_in(blocks, [])
        return _OnDevice(slabs, bucket, blocks, tensors, arrival)

    def _update_resident(self) -> None:
        """The parameters that stay, and groups that have none."""
        groups = {}
        for number, group in enumerate(self._groups):
            stays = [weight for weight in group["params"] if id(weight) not in self._of_weight]
            if stays or not group["params"]:
                groups[number] = stays
        self._step_groups(groups)

    def _update(self, present: _OnDevice) -> None:
        layout, parameters = present.slabs.layout, present.slabs.parameters
        whole = {key: tensor.view(dtype) for (key, dtype), tensor in zip(layout, present.tensors, strict=True)}
        stand_ins: list[tuple[Parameter, Segment, Tensor, dict[str, Tensor]]] = []
        groups: dict[int, list[Tensor]] = {}
        for segment in present.bucket.segments:
            parameter = parameters[segment.parameter]
            part = {key: tensor[segment.offset :][: segment.num] for key, tensor in whole.items()}
            stand_in = part.pop(MAIN, None)
            if stand_in is None:
                stand_in = _part(parameter.weight.detach(), segment)
            if not _give_gradient(stand_in, parameter.weight, segment):
                continue
            counted = {key: value for key, value in self._optimizer.state[parameter.weight].items() if key not in part}
            self._optimizer.state[stand_in] = part | {
                key: value.clone() if torch.is_tensor(value) else value for key, value in counted.items()
            }
            groups.setdefault(parameter.group, []).append(stand_in)
            stand_ins.append((parameter, segment, stand_in, part))
        self._step_groups(groups)
        for parameter, segment, stand_in, part in stand_ins:
            state = self._optimizer.state.pop(stand_in)
            for key, tensor in part.items():
                if state[key].data_ptr() != tensor.data_ptr():
                    tensor.copy_(state[key])
            self._counted[id(parameter.weight)] = {key: value for key, value in state.items() if key not in part}
            if parameter.copied_to is not None:
                parameter.copied_to()[segment.start :][: segment.num].copy_(stand_in)

    def _step_groups(self, groups: Mapping[int, list[Tensor]]) -> None:
        """One call of the optimizer's own step, which finds these parameters alone."""
        if not groups:
            return
        self._optimizer.param_groups = [
            {**self._groups[number], "params": weights} for number, weights in groups.items()
        ]
        try:
            self._step()
            for number, group in zip(groups, self._optimizer.param_groups, strict=True):
                self._group_values[number] = {key: value for key, value in group.items() if key != "params"}
        finally:
            self._optimizer.param_groups = self._groups

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """What the optimizer's own does, into the memory that is there."""
        weights = [weight for group in self._groups for weight in group["params"]]
        saved_groups = state_dict["param_groups"]
        assert [len(group["params"]) for group in self._groups] == [len(saved["params"]) for saved in saved_groups]
        numbers = [number for saved in saved_groups for number in saved["params"]]
        for group, saved in zip(self._groups, saved_groups, strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        for weight, number in zip(weights, numbers, strict=True):
            state, homes = self._optimizer.state[weight], self._of_weight.get(id(weight), {})
            for key, value in state_dict["state"].get(number, {}).items():
                there = homes.get(key, state.get(key))
                if torch.is_tensor(value) and torch.is_tensor(there) and key != "step":
                    if value.data_ptr() != there.data_ptr():
                        there.copy_(value)
                elif torch.is_tensor(value):
                    state[key] = value.clone() if key == "step" else value.to(weight.device, copy=True)
                else:
                    state[key] = value


def _layout(optimizer: torch.optim.Optimizer, parameter: Parameter) -> Layout:
    layout = state_of(optimizer, parameter.weight)
    return layout if parameter.copied_to is None else ((MAIN, parameter.weight.dtype), *layout)


def _home(block: Block, dtype: torch.dtype, start: int, num: int) -> Tensor:
    """Values of a slab, in a storage without others: who saves a tensor saves its storage, or copies it before."""
    (extent,) = block.pieces
    values = extent.slab.data[start * dtype.itemsize :][: num * dtype.itemsize].view(dtype)
    return torch.from_numpy(values.numpy())


def _part(tensor: Tensor, segment: Segment) -> Tensor:
    return tensor.view(-1)[segment.start :][: segment.num]


def _give_gradient(stand_in: Tensor, weight: Tensor, segment: Segment) -> bool:
    """A segment's part of a gradient, which Transformer Engine's precision-aware Adam wants under another name."""
    found = False
    for name in ("grad", "decoupled_grad"):
        gradient = getattr(weight, name, None)
        if gradient is not None:
            setattr(stand_in, name, gradient.reshape(-1)[segment.start :][: segment.num])
            found = True
    return found
