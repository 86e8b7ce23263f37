"""A function that is run again in backward gives the same bits, and leaves nothing but its input."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from nemo_rl_offload.megatron.layers.recomputation import recomputed
from nemo_rl_offload.offload import HostBackend, OffloadEngine
from nemo_rl_offload.offload.arena import ALIGNMENT_BYTES


class Part(nn.Module):
    """A linear that is recomputed with an activation, and one that uses the result."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 32), nn.Linear(32, 8)
        self.num_runs = 0

    def activated(self, x: Tensor) -> Tensor:
        self.num_runs += 1
        return self.first(x).sigmoid().square()

    def forward(self, x: Tensor, recompute: bool) -> Tensor:
        if not recompute:
            return self.second(self.activated(x))
        activated = recomputed(self.activated, x)
        with activated.users():
            return self.second(activated.output)


def outcome(part: Part, recompute: bool, num_backwards: int = 1) -> list[Tensor]:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1), requires_grad=True)
    y = part(x * 1, recompute)
    for number in range(num_backwards):
        y.square().sum().backward(retain_graph=number < num_backwards - 1)
    assert x.grad is not None
    return [y.detach(), x.grad, *(parameter.grad for parameter in part.parameters() if parameter.grad is not None)]


@pytest.mark.parametrize("num_backwards", [1, 3])
def test_same_bits(num_backwards: int) -> None:
    part = Part()
    got = outcome(part, True, num_backwards)
    assert part.num_runs == 1 + num_backwards
    assert len(got) == 6
    assert all(map(torch.equal, got, outcome(Part(), False, num_backwards)))


def storages_saved(make: Callable[[], Any]) -> list[int]:
    """Bytes of each storage that a graph keeps, parameters left out."""
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter) and tensor.numel() != 32 * 8:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        make()
    return sorted(saved.values())


def test_nothing_is_kept_but_the_input() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    assert 4 * 32 * 4 in storages_saved(lambda: Part()(x, False))
    assert storages_saved(lambda: Part()(x, True)) == [4 * 8 * 4]


@pytest.fixture
def engine() -> Iterator[OffloadEngine]:
    engine = OffloadEngine(HostBackend(), host_memory_budget_bytes=1 << 20, min_tensor_bytes=0)
    yield engine
    engine.close()


def test_the_input_waits_on_the_host_and_is_gone_after_backward(engine: OffloadEngine) -> None:
    part = Part()
    x = torch.randn(4, 8, requires_grad=True)
    with engine.region("m", 0) as region:
        activated = recomputed(part.activated, x * 1)
    with activated.users():
        y = part.second(activated.output)
    y = engine.commit(region, y)
    del activated
    assert engine.stats().host_bytes == ALIGNMENT_BYTES
    assert engine.stats().bytes_out == 4 * 8 * 4
    y.sum().backward()
    assert engine.stats().host_bytes == 0
    assert engine.stats().bytes_in == 4 * 8 * 4
    assert engine.stats().ineffective_bytes == 0
    assert engine.stats().demand_reloads == 0, "backward reaches the region's end before it wants the output"
    assert not engine._slots, "the graph, which `y` keeps, holds no input any more"


def test_an_input_without_gradient_loses_no_weights_gradient() -> None:
    part = Part()
    part(torch.ones(4, 8), True).sum().backward()
    assert all(parameter.grad is not None for parameter in part.parameters())
    with torch.no_grad():
        assert not part(torch.ones(4, 8, requires_grad=True), True).requires_grad


def test_gradients_without_backward() -> None:
    gradients = []
    for recompute in (True, False):
        part, x = Part(), torch.ones(4, 8, requires_grad=True)
        gradients.append(torch.autograd.grad(part(x, recompute).square().sum(), [x, *part.parameters()]))
    assert all(map(torch.equal, *gradients))


def test_memory_goes_as_backward_comes_along() -> None:
    """What the second run saved is handed out, and nobody else holds it."""
    alive: dict[str, list[bool]] = {}

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
            ctx.save_for_backward(x)
            ctx.name = name
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            (x,) = ctx.saved_tensors
            seen[ctx.name] = StorageWeakRef(x.untyped_storage())
            alive[ctx.name] = [not ref.expired() for name, ref in seen.items() if name != ctx.name]
            return grad * 2, None

    seen: dict[str, StorageWeakRef] = {}
    x = torch.ones(4, requires_grad=True)
    run = recomputed(lambda x: Watched.apply(Watched.apply(x, "first"), "second"), x * 1)  # type: ignore[no-untyped-call]
    with run.users():
        y = Watched.apply(run.output, "user")  # type: ignore[no-untyped-call]
    del run
    y.sum().backward()
    assert alive == {"user": [], "second": [False], "first": [False, False]}
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((4,), 8.0))


def test_runs_that_save_differently_are_noticed() -> None:
    runs = iter([1, 2])

    def changing(x: Tensor) -> Tensor:
        for _ in range(next(runs)):
            x = x.sigmoid()
        return x

    run = recomputed(changing, torch.ones(4, requires_grad=True) * 1)
    with run.users():
        y = run.output.exp() * run.output
    with pytest.raises(AssertionError, match="saves other tensors"):
        y.sum().backward()
