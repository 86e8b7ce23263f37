"""What listed modules return, and what they are called by and wrapped in."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from block_model import Model, batch, gradients, identical, offload
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.func import functional_call, grad, jvp, vmap
from torch.testing._internal.two_tensor import TwoTensor

from nemo_rl_offload.errors import ConfigError


@dataclass
class Output:
    hidden: Any
    name: str = "output"


class Pair(NamedTuple):
    name: str
    hidden: Tensor


class Opaque:
    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class Part(nn.Module):
    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.wrap = wrap

    def forward(self, x: Tensor) -> Any:
        return self.wrap(torch.tanh(x))


class Whole(nn.Module):
    def __init__(self, wrap: Callable[[Tensor], Any], unwrap: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.first, self.part, self.unwrap = nn.Linear(8, 8), Part(wrap), unwrap

    def forward(self, x: Tensor) -> Tensor:
        return self.unwrap(self.part(self.first(x))).sum()


def steps(model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(0)
    loss = model(torch.randn(4, 8))
    loss.backward()
    return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


@pytest.mark.parametrize(
    ("wrap", "unwrap"),
    [
        (Output, lambda output: output.hidden),
        (lambda x: Output([{"deep": Output(x)}]), lambda output: output.hidden[0]["deep"].hidden),
        (lambda x: (None, Output(x)), lambda output: output[1].hidden),
        (lambda x: Pair("pair", x), lambda output: output.hidden),
        (lambda x: {"of": [x]}, lambda output: output["of"][0]),
    ],
)
def test_outputs_of_every_kind(wrap: Callable[[Tensor], Any], unwrap: Callable[[Any], Tensor]) -> None:
    model = Whole(wrap, unwrap)
    expected = steps(model)
    with offload(model, ["part"]) as active:
        assert identical(steps(model), expected)
    assert active.stats().bytes_out == active.stats().bytes_in == 4 * 8 * 4


def test_an_output_that_shows_no_tensor_is_warned_about() -> None:
    model = Whole(Opaque, lambda output: output.hidden)
    expected = steps(model)
    with pytest.warns(UserWarning, match="it returned a Opaque in which no tensor"), offload(model, ["part"]) as active:
        assert identical(steps(model), expected)
    assert active.stats().bytes_out == 0


@pytest.mark.parametrize(
    ("transform", "name"),
    [
        (lambda model, weights, x: grad(lambda w: functional_call(model, w, (x,)))(weights), "grad"),
        (lambda model, _, x: vmap(model)(x[:, None]), "vmap"),
        (lambda model, _, x: jvp(model, (x,), (x,)), "jvp"),
    ],
)
def test_function_transforms_are_refused_by_name(transform: Callable[..., Any], name: str) -> None:
    model = Whole(Output, lambda output: output.hidden)
    expected = steps(model)
    weights = dict(model.named_parameters())
    with offload(model, ["part"]):
        with pytest.raises(ConfigError, match=rf"part: called inside of torch.func.{name}, which has no hooks"):
            transform(model, weights, torch.randn(4, 8))
        assert identical(steps(model), expected)
    transform(model, weights, torch.randn(4, 8))


def test_a_functional_call_is_no_transform() -> None:
    model = Whole(Output, lambda output: output.hidden)
    weights = {name: each.detach().clone().requires_grad_() for name, each in model.named_parameters()}
    with offload(model, ["part"]) as active:
        functional_call(model, weights, (torch.randn(4, 8),)).backward()
    assert active.stats().bytes_out == 4 * 8 * 4
    assert all(each.grad is not None for each in weights.values())


def test_paths_go_through_checkpoint_wrappers() -> None:
    model = Model()
    expected = gradients(model, batch())
    for block in model.blocks:
        block.mlp = checkpoint_wrapper(block.mlp)
    with offload(model, ["blocks.*.norm", "blocks.*.mlp.0"]) as active:
        assert identical(gradients(model, batch()), expected)
    stats = active.stats()
    assert stats.per_module["blocks.*.norm"].bytes_out > 0
    assert stats.per_module["blocks.*.mlp.0"].bytes_out > 0


def test_tensors_of_another_class_stay_and_are_named() -> None:
    part = nn.Sequential(Part(lambda x: x))
    x = TwoTensor(torch.randn(4, 8), torch.randn(4, 8)).requires_grad_()  # a wrapper, as a DTensor is
    with pytest.warns(UserWarning, match="what it saved is a TwoTensor, and only plain tensors"), offload(part, ["0"]):
        part(x).sum().backward()


def test_nothing_is_warned_about_without_a_reason() -> None:
    model = Whole(Output, lambda output: output.hidden)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with offload(model, ["part"]):
            steps(model)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = Part(torch.sin)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.part(x * mask)


class Masking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Masked() for _ in range(2))
        self.weight = nn.Parameter(torch.full((64,), 0.5))

    def forward(self, mask: Tensor) -> Tensor:
        x: Tensor = self.weight
        for layer in self.layers:
            x = layer(x, mask)
        return x


@pytest.mark.parametrize("names", [["layers.*"], ["layers.*.part"], ["layers.*", "layers.*.part"], ["layers.1"]])
def test_a_buffer_that_each_forward_fills_anew(names: list[str]) -> None:
    """Through `.data`, of which no version counter tells, while the graph of the forward before is alive."""

    def second_gradient(model: Masking) -> Tensor:
        mask = torch.full((64,), 2.0)
        first = model(mask)
        mask.data.fill_(3.0)
        model(mask).sum().backward()
        assert first.requires_grad
        assert model.weight.grad is not None
        return model.weight.grad

    expected = second_gradient(Masking())
    model = Masking()
    with offload(model, names) as active:
        assert torch.equal(second_gradient(model), expected)
    assert active.stats().bytes_out


def test_such_a_buffer_where_the_whole_is_called_otherwise() -> None:
    """By its `forward`, or with two offloadings, of which one alone hears of its calls."""

    def second_gradient(model: Masking, call: Callable[[Tensor], Tensor]) -> Tensor:
        mask = torch.full((64,), 2.0)
        first = call(mask)
        mask.data.fill_(3.0)
        call(mask).sum().backward()
        assert first.requires_grad
        assert model.weight.grad is not None
        return model.weight.grad

    plain, model, other = Masking(), Masking(), Masking()
    expected = second_gradient(plain, plain)
    with offload(model, ["layers.*"]):
        assert torch.equal(second_gradient(model, model.forward), expected)
    with offload(other, ["layers.0"]), offload(other, ["layers.1"]):
        assert torch.equal(second_gradient(other, other), expected)


def test_views_of_one_storage_are_moved_once() -> None:
    """Of a batch whose parts are forwards of their own, and of a sequence that a cell goes along."""
    cell = nn.RNNCell(8, 8)
    steps_of_a_sequence = nn.ModuleDict({"cell": cell})
    sequence, hidden = torch.randn(4, 16, 8), torch.zeros(4, 8)
    with offload(steps_of_a_sequence, ["cell"]) as active:
        for step in range(16):
            hidden = cell(sequence[:, step], hidden)
        hidden.sum().backward()
    assert active.stats().bytes_out < 2 * sequence.nbytes + 3 * 16 * hidden.nbytes
    layer = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    batch_of_parts = torch.randn(64, 8)
    with offload(layer, ["0"]) as active:
        sum(layer(part).sum() for part in batch_of_parts.split(8)).backward()
    assert active.stats().bytes_out <= batch_of_parts.nbytes
