"""What any engine owes a step that differs from the first: held by ours, broken by one that records the first step.

`RecordingEngine` works as usual engines do: pools of host buffers by tensor shape, and a schedule that counts groups
in the first step and is followed by position ever after. Each promise is asked of both, so that no test here can pass
for want of a question.
"""

import random
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from nemo_rl_offload.offload import HostBackend, OffloadEngine
from nemo_rl_offload.offload import arena as arena_module

WIDTH = 64
NUM_LAYERS = 4
MIN_SLAB_BYTES = 1 << 10


class RecordingEngine:
    """A shape-keyed, counter-based engine with the calls that the steps below make."""

    def __init__(self) -> None:
        self.capacity_bytes = 0
        self.bytes_out = 0
        self._pools: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}
        self._schedule: list[bool] | None = None  # by position in the step: whether tensors were saved there
        self._saved: list[bool] = []

    @contextmanager
    def region(self, module: str, layer: int) -> Any:
        position = len(self._saved)
        self._saved.append(False)
        moves = self._schedule is None or (position < len(self._schedule) and self._schedule[position])

        def pack(tensor: Tensor) -> Any:
            self._saved[position] = True
            if not moves:
                return tensor
            pool = self._pools.setdefault((tensor.shape, tensor.dtype), [])
            if not pool:
                self.capacity_bytes += tensor.nbytes
                pool.append(torch.empty(tensor.shape, dtype=tensor.dtype))
            self.bytes_out += tensor.nbytes
            return pool.pop().copy_(tensor), pool

        def unpack(packed: Any) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            buffer, pool = packed
            pool.append(buffer)
            return buffer.clone()

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield

    def commit(self, region: object, output: Tensor) -> Tensor:
        return output

    def end_step(self) -> None:
        if self._schedule is None:
            self._schedule = self._saved
        self._saved = []


def ours() -> OffloadEngine:
    return OffloadEngine(HostBackend(), host_memory_budget_bytes=1 << 30, min_tensor_bytes=0)


def bytes_out(engine: Any) -> int:
    return engine.bytes_out if isinstance(engine, RecordingEngine) else engine.stats().bytes_out


def host_bytes(engine: Any) -> int:
    return engine.capacity_bytes if isinstance(engine, RecordingEngine) else engine.stats().host_capacity_bytes


def forward(engine: Any, x: Tensor, fail_at: int | None = None) -> Tensor:
    """Layers that each save two tensors of their input's shape inside a region, all of which must move."""
    x = x * 1
    for layer in range(NUM_LAYERS):
        with engine.region("mlp", layer) as region:
            y = x.sin().exp()
            if layer == fail_at:
                raise KeyError("no such token")
        x = engine.commit(region, y)
    return x


def step(engine: Any, lengths: list[int], fail_at: int | None = None) -> int:
    """Forwards of all microbatches, then their backwards; returns the bytes that were offloaded."""
    before = bytes_out(engine)
    losses = [
        forward(engine, torch.ones(length, WIDTH, requires_grad=True), fail_at if number else None).sum()
        for number, length in enumerate(lengths)
    ]
    while losses:
        losses.pop().backward()
    engine.end_step()
    return bytes_out(engine) - before


def step_bytes(lengths: list[int]) -> int:
    """What a step saves: in each layer the input of `sin` and the output of `exp`, the next layer's input."""
    return sum(lengths) * WIDTH * 4 * (NUM_LAYERS + 1)


def more_microbatches_are_offloaded_too(engine: Any) -> bool:
    step(engine, [8, 8])
    return step(engine, [8] * 4) >= step_bytes([8] * 4) and step(engine, [8]) >= step_bytes([8])


def a_forward_only_pass_first_changes_nothing(engine: Any) -> bool:
    with torch.no_grad():
        forward(engine, torch.ones(8, WIDTH))
    engine.end_step()
    return step(engine, [8, 8]) >= step_bytes([8, 8])


def an_exception_costs_nothing_later(engine: Any) -> bool:
    for fail_at in range(NUM_LAYERS):
        step(engine, [8, 8])
        with pytest.raises(KeyError):
            step(engine, [8, 8], fail_at)
    later = step(engine, [8, 8])
    if not isinstance(engine, RecordingEngine):
        assert engine.stats().host_bytes == 0
    return later >= step_bytes([8, 8])


def host_memory_stays_at_the_largest_step(engine: Any) -> bool:
    """1,000 steps whose lengths have a long tail: at most 1.10 of the largest step and a slab of 1/16 of it."""
    chance = random.Random(0)
    largest_bytes = 0
    for _ in range(1000):
        lengths = [min(256, 8 + int(chance.expovariate(1 / 24))) for _ in range(chance.randint(1, 4))]
        largest_bytes = max(largest_bytes, step(engine, lengths))
    assert largest_bytes / 16 >= MIN_SLAB_BYTES
    return host_bytes(engine) <= 1.10 * largest_bytes + largest_bytes / 16


PROMISES = [
    more_microbatches_are_offloaded_too,
    a_forward_only_pass_first_changes_nothing,
    an_exception_costs_nothing_later,
    host_memory_stays_at_the_largest_step,
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
def test_ours_keeps_what_a_recorded_schedule_breaks(
    promise: Callable[[Any], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena_module, "MIN_SLAB_BYTES", MIN_SLAB_BYTES)
    assert promise(ours())
    assert not promise(RecordingEngine())


def test_the_recording_engine_offloads_steps_that_are_all_alike() -> None:
    engine = RecordingEngine()
    moved = Counter(step(engine, [8, 8]) for _ in range(5))
    assert len(moved) == 1
    assert min(moved) >= step_bytes([8, 8])
