"""A function that is run again in backward gives the same bits, and leaves nothing but its input."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nemo_rl_offload.megatron.recomputation import recomputed
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


def test_gradients_without_backward_are_refused() -> None:
    part = Part()
    x = torch.ones(4, 8, requires_grad=True)
    y = part(x, True)
    with pytest.raises(RuntimeError, match=r"needs \.backward\(\)"):
        torch.autograd.grad(y.sum(), [x])
