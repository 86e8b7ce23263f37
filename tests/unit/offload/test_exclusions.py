"""Parameters, and whatever lies on their storages, stay on the device."""

import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from nemo_rl_offload.offload import OffloadEngine

Make = Callable[..., OffloadEngine]


def test_parameters_their_views_and_excluded_storages_stay(make_engine: Make) -> None:
    engine = make_engine()
    buffer = torch.randn(64)  # as a data-parallel wrapper lays parameters out
    weight = nn.Parameter(torch.empty(0))
    weight.data = buffer[:16].view(4, 4)
    constant = torch.randn(4, 4)
    engine.exclude([weight, constant])
    x = torch.randn(4, 4, requires_grad=True)

    layers = itertools.count()

    def bytes_of(*saved: Tensor) -> int:
        before = engine.stats().bytes_out
        with engine.region("m", next(layers)) as region:
            y = sum(x * each for each in saved)
        engine.commit(region, y).sum().backward()
        return engine.stats().bytes_out - before

    x_bytes = 64  # a product saves x too when the other factor needs a gradient
    assert bytes_of(weight, weight.t(), weight.view(16)[:4]) == x_bytes
    assert bytes_of(buffer[32:48].view(4, 4), constant.t(), weight.data) == 0
    weight.data = torch.randn(4, 4)
    constant.data = torch.randn(4, 4)
    assert bytes_of(weight.t(), constant, constant.t()) == x_bytes
    assert bytes_of(weight.data, constant.data) == 0  # looked up again: no slot was left
    constant.data = torch.randn(4, 4)
    engine.end_step()
    assert bytes_of(constant.data) == 0
    assert bytes_of(buffer[:16].view(4, 4)) == 256


def test_a_view_of_a_parameter_that_nobody_excluded_stays(make_engine: Make) -> None:
    engine = make_engine()
    weight = nn.Parameter(torch.randn(4, 4))
    with torch.no_grad():
        view = weight.t()
    assert view._base is weight
    x = torch.randn(4, 4, requires_grad=True)
    with engine.region("m", 0) as region:
        y = x * view
    engine.commit(region, y).sum().backward()
    assert engine.stats().bytes_out == 0
