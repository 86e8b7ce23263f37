"""A chain of groups with given bytes and times, trained on the simulated device."""

from dataclasses import dataclass
from typing import Any

import torch
from simulated_backend import SimulatedBackend
from torch import Tensor

from nemo_rl_offload.offload.engine import OffloadEngine


@dataclass(frozen=True)
class GroupShape:
    """`num_bytes` saved; the module's compute in ms. Scaled: 1 byte here stands for 10 KB."""

    num_bytes: int
    forward_ms: float
    backward_ms: float


class Module(torch.autograd.Function):
    """Saves `num_bytes` and takes time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, backend: SimulatedBackend, shape: GroupShape) -> Tensor:
        ctx.backend, ctx.shape = backend, shape
        backend.compute(shape.forward_ms)
        ctx.save_for_backward(torch.full((shape.num_bytes,), 7, dtype=torch.uint8))
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (saved,) = ctx.saved_tensors
        assert bool((saved == 7).all())
        ctx.backend.compute(ctx.shape.backward_ms)
        return grad, None, None


def forward(
    engine: OffloadEngine, backend: SimulatedBackend, shapes: list[GroupShape], x: Tensor
) -> tuple[Tensor, tuple[int, ...]]:
    """The output, and the layers whose bytes were sent to the host."""
    moved = []
    for layer, shape in enumerate(shapes):
        bytes_out = engine.stats().bytes_out
        with engine.region("m", layer) as region:
            x = Module.apply(x, backend, shape)
        x = engine.commit(region, x)
        if engine.stats().bytes_out > bytes_out:
            moved.append(layer)
    return x, tuple(moved)


@dataclass(frozen=True)
class StepFigures:
    step_ms: float
    stall_in_ms: float
    stall_out_ms: float
    moved: tuple[int, ...]
    """The layers that were offloaded."""


def train_step(
    engine: OffloadEngine, backend: SimulatedBackend, shapes: list[GroupShape], head_ms: float = 0.0
) -> StepFigures:
    """One forward and backward; the head's time lies between them. Stalls are those of this step."""
    start_ms, before = backend.now_ms, engine.stats()
    y, moved = forward(engine, backend, shapes, torch.ones(1, requires_grad=True))
    backend.compute(head_ms)
    y.sum().backward()
    step_ms = backend.now_ms - start_ms
    backend.synchronize()
    engine.end_step()
    after = engine.stats()
    return StepFigures(
        step_ms,
        after.stall_in_ms - before.stall_in_ms,
        after.stall_out_ms - before.stall_out_ms,
        moved,
    )
