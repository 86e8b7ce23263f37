"""Listed modules that call themselves and each other, as deep as Python lets them without offloading."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nemo_rl_offload import offload_activations

WIDTH = 8


class Itself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, depth: int) -> Tensor:
        return x if depth == 0 else torch.tanh(self.linear(self(x, depth - 1)))


class EachOther(nn.Module):
    def __init__(self, other: "EachOther | None" = None) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.others = [other if other is not None else EachOther(self)]

    def forward(self, x: Tensor, depth: int) -> Tensor:
        return x if depth == 0 else torch.tanh(self.linear(self.others[0](x, depth - 1)))


class Checkpointed(Itself):
    def forward(self, x: Tensor, depth: int) -> Tensor:
        if depth == 0:
            return x
        return checkpoint(lambda y: torch.tanh(self.linear(y)), self(x, depth - 1), use_reentrant=False)


class InSequence(Itself):
    def forward(self, x: Tensor, depth: int) -> Tensor:
        for _ in range(depth):
            x = torch.tanh(self.linear(x))
        return x


class Model(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        if isinstance(inner, EachOther):
            self.other = inner.others[0]

    def forward(self, x: Tensor, depth: int) -> Tensor:
        return self.inner(x, depth)


def results(model: nn.Module, depth: int) -> list[Tensor]:
    model.zero_grad()
    x = torch.linspace(-1, 1, 3 * WIDTH).view(3, WIDTH).requires_grad_()
    loss = model(x, depth).square().mean()
    loss.backward()
    return [loss.detach(), *(each.grad.clone() for each in (x, *model.parameters()) if each.grad is not None)]


CASES: list[Any] = [
    (Itself, ["inner"], 150),
    (Itself, ["inner", "inner.linear"], 150),
    (EachOther, ["inner", "other"], 150),
    (EachOther, ["inner"], 150),
    (Checkpointed, ["inner"], 150),
    (InSequence, ["inner", "inner.linear"], 300),
]


@pytest.mark.parametrize(("kind", "modules", "depth"), CASES)
def test_results_are_those_without_offloading(kind: type[nn.Module], modules: list[str], depth: int) -> None:
    torch.manual_seed(0)
    model = Model(kind())
    expected = results(model, depth)
    with offload_activations(model, modules, min_tensor_bytes=0) as active:
        got = results(model, depth)
        got_again = results(model, depth)
        assert active.stats().bytes_out > 0
    assert all(map(torch.equal, got, expected))
    assert all(map(torch.equal, got_again, expected))
    assert active.stats().host_bytes == 0


def deepest(model: nn.Module) -> int:
    """The least depth that is too much, to within two."""
    fits, fails = 100, 1000
    while fails - fits > 2:
        depth = (fits + fails) // 2
        try:
            model(torch.ones(1, WIDTH), depth)
            fits = depth
        except RecursionError:
            fails = depth
    return fails


def test_python_allows_as_many_levels_as_without_offloading() -> None:
    model = Model(Itself())
    allowed = deepest(model)
    with offload_activations(model, ["inner"], min_tensor_bytes=0):
        model(torch.ones(1, WIDTH), 100).sum().backward()
        assert deepest(model) >= allowed - 4
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        model(torch.ones(1, WIDTH), 100).sum().backward()
