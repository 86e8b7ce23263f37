"""Offloading changes no bit of any gradient, whatever is saved, in whatever order, however often."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nemo_rl_offload.offload import HostBackend, OffloadEngine

Make = Callable[..., OffloadEngine]


class Layer(nn.Module):
    """A transformer layer whose modules are regions in Megatron's order: attn_norm and mlp_norm close early,
    and are committed late. With `engine` None: the same without regions."""

    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.attn_norm, self.mlp_norm = nn.LayerNorm(width), nn.RMSNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width, bias=False)
        self.dropout = dropout

    def forward(self, x: Tensor, engine: OffloadEngine | None, layer: int = 0) -> Tensor:
        with opened(engine, "attn_norm", layer) as attn_norm:
            h = self.attn_norm(x)
        with opened(engine, "qkv_linear", layer) as region:
            qkv = self.qkv(h)
        qkv = committed(engine, region, qkv)
        with opened(engine, "core_attn", layer) as region:
            batch, length, _ = x.shape
            q, k, v = (each.view(batch, length, 2, -1).transpose(1, 2) for each in qkv.chunk(3, -1))
            mask = torch.ones(1, 1, length, 1, device=x.device).expand(batch, 2, length, length).tril()
            scores = (q @ k.transpose(-1, -2)).masked_fill(mask == 0, -1e9).softmax(-1)
            attended = F.dropout(scores, self.dropout) @ v
            attended = attended.transpose(1, 2).reshape(x.shape)
        attended = committed(engine, region, attended)
        with opened(engine, "attn_proj", layer) as region:
            projected = self.proj(attended)
        projected = committed(engine, region, projected, release=(attended,))
        del attended
        x = committed(engine, attn_norm, x + F.dropout(projected, self.dropout))
        with opened(engine, "mlp_norm", layer) as mlp_norm:
            h = self.mlp_norm(x)
        with opened(engine, "mlp_act", layer) as region:
            h = F.silu(self.fc1(h)).exp().tanh()
        h = committed(engine, region, h)
        return committed(engine, mlp_norm, x + self.fc2(h))


@contextmanager
def opened(engine: OffloadEngine | None, module: str, layer: int) -> Iterator[object]:
    if engine is None:
        yield None
        return
    with engine.region(module, layer) as region:
        yield region


def committed(engine, region, output, release=()):
    return output if engine is None else engine.commit(region, output, release)


def model_and_input(dtype: torch.dtype, dropout: float, num_layers: int = 2) -> tuple[nn.ModuleList, Tensor]:
    torch.manual_seed(0)
    layers = nn.ModuleList(Layer(16, dropout) for _ in range(num_layers)).to(dtype)
    return layers, torch.randn(2, 5, 16, dtype=dtype)


def gradients(layers: nn.ModuleList, x: Tensor, run: Callable[[Tensor], Tensor]) -> list[Tensor]:
    layers.zero_grad()
    x = x.clone().requires_grad_()
    torch.manual_seed(1)
    loss = run(x * 1.0).square().mean()
    loss.backward()
    assert x.grad is not None
    return [loss.detach(), x.grad, *(p.grad.clone() for p in layers.parameters())]


def stack(layers: nn.ModuleList, engine: OffloadEngine | None) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        for number, layer in enumerate(layers):
            x = layer(x, engine, number)
        return x

    return run


def assert_identical(got: list[Tensor], expected: list[Tensor]) -> None:
    assert len(got) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_transformer_layers_are_bit_identical(make_engine: Make, dtype: torch.dtype, dropout: float) -> None:
    layers, x = model_and_input(dtype, dropout)
    engine = make_engine()
    engine.exclude(layers.parameters())
    assert_identical(gradients(layers, x, stack(layers, engine)), gradients(layers, x, stack(layers, None)))
    stats = engine.stats()
    assert stats.bytes_out == stats.bytes_in == sum(each.bytes_out for each in stats.per_module.values()) > 0
    assert stats.per_module.keys() == {
        "attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "mlp_act"
    }  # fmt: skip
    assert all(each.bytes_out > 0 for each in stats.per_module.values())
    assert all(each.num_groups == 2 for each in stats.per_module.values())
    assert stats.demand_reloads == stats.denied_bytes == stats.host_bytes == 0


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("place", ["around", "inside"])
def test_checkpointing_around_and_inside_regions(make_engine: Make, use_reentrant: bool, place: str) -> None:
    layers, x = model_and_input(torch.float32, 0.2)

    def run_with(engine: OffloadEngine | None) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            for number, layer in enumerate(layers):
                if place == "around":
                    x = checkpoint(layer, x, engine, number, use_reentrant=use_reentrant)
                else:
                    with opened(engine, "layer", number) as region:
                        x = checkpoint(layer, x.exp(), None, number, use_reentrant=use_reentrant)
                    x = committed(engine, region, x)
            return x

        return run

    engine = make_engine()
    engine.exclude(layers.parameters())
    assert_identical(gradients(layers, x, run_with(engine)), gradients(layers, x, run_with(None)))
    # Inside a reentrant checkpoint nothing is saved in forward, and its recomputation is used at once. Without
    # reentry, a region takes its tensors out of the recomputation.
    assert (engine.stats().bytes_out > 0) == (place == "inside" or not use_reentrant)
    assert engine.stats().host_bytes == 0


@settings(max_examples=25, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 5), st.sampled_from([0, 300, 1 << 20]))
def test_graphs_in_any_order(chance: random.Random, num_graphs: int, cap_bytes: int) -> None:
    """Random depths, lengths, orders of commit and backward, repeated and abandoned backward, budgets."""
    engine = OffloadEngine(
        HostBackend(),
        host_memory_budget_bytes=chance.choice([1 << 12, 1 << 22]),
        min_tensor_bytes=chance.choice([0, 200]),
        max_prefetch_bytes=cap_bytes,
    )
    weight = torch.randn(8, 8, dtype=torch.float64, requires_grad=True)
    alive = []
    for graph in range(num_graphs):
        x = torch.randn(chance.randint(1, 9), 8, dtype=torch.float64)
        plain = offloaded = x
        late = []
        for layer in range(chance.randint(1, 4)):
            plain = torch.tanh(plain @ weight) * plain.sum(-1, keepdim=True)
            with engine.region(f"m{graph}", layer) as region:
                offloaded = torch.tanh(offloaded @ weight) * offloaded.sum(-1, keepdim=True)
            if chance.random() < 0.5:
                offloaded = engine.commit(region, offloaded)
            else:
                late.append(region)
        chance.shuffle(late)
        for region in late:
            offloaded = engine.commit(region, offloaded)
        alive.append((plain.sum(), offloaded.sum()))
        del plain, offloaded, region
    chance.shuffle(alive)
    while alive:
        plain_loss, loss = alive.pop()
        if chance.random() < 0.2:
            continue
        for last in [False, True][chance.randint(0, 1) :]:
            (expected,) = torch.autograd.grad(plain_loss, weight, retain_graph=not last)
            (got,) = torch.autograd.grad(loss, weight, retain_graph=not last)
            assert torch.equal(got, expected)
    del plain_loss, loss
    stats = engine.stats()
    assert stats.host_bytes == 0
    assert stats.bytes_in <= stats.bytes_out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.bool])
def test_views_are_rebuilt_over_one_copy_of_their_storage(make_engine: Make, dtype: torch.dtype) -> None:
    class SaveViews(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, *views):
            ctx.save_for_backward(*views)
            ctx.expected = [view.clone() for view in views]
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            for got, expected in zip(ctx.saved_tensors, ctx.expected, strict=True):
                assert got.dtype is expected.dtype
                assert torch.equal(got, expected)
            seen.extend((got.stride(), got.storage_offset()) for got in ctx.saved_tensors)
            return grad * 2, *[None] * len(ctx.expected)

    seen: list[tuple[tuple[int, ...], int]] = []
    base = torch.randint(0, 2, (6, 4)).to(dtype)
    views = [
        base,
        base.t(),
        base[1:3, ::2],
        base[:, :1].expand(6, 7),
        base.as_strided((3, 3), (1, 1), 2),
        torch.empty(0, 3, dtype=dtype),
        base[:0],
    ]
    layout = [(view.stride(), view.storage_offset()) for view in views]
    num_bytes = base.untyped_storage().nbytes()
    engine = make_engine()
    with engine.region("m", 0) as region:
        y = SaveViews.apply(torch.ones(1, requires_grad=True), *views)
    engine.commit(region, y).sum().backward()
    assert seen == layout
    assert engine.stats().bytes_out == num_bytes


def test_what_a_tensor_knows_beside_its_bytes_comes_back(make_engine: Make) -> None:
    class Save(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, *saved):
            ctx.save_for_backward(*saved)
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            read.extend(ctx.saved_tensors)
            return grad * 2, *[None] * len(read)

    def facts(tensor: Tensor) -> tuple[bool, bool, bool, list[float]]:
        values = tensor.dequantize() if tensor.is_quantized else tensor
        return tensor.is_conj(), tensor.is_neg(), tensor.is_quantized, values.tolist()

    read: list[Tensor] = []
    z = torch.randn(8, dtype=torch.complex64)
    tensors = [z.conj(), z.conj().imag, torch.quantize_per_tensor(torch.randn(8), 0.1, 0, torch.quint8)]
    expected = [facts(tensor) for tensor in tensors]
    assert [sum(bits) for *bits, _ in expected] == [1, 1, 1]
    engine = make_engine()
    with engine.region("m", 0) as region:
        y = Save.apply(torch.ones(1, requires_grad=True), *tensors)
    y = engine.commit(region, y)
    assert engine.stats().bytes_out == z.nbytes + 8
    del z, tensors
    y.sum().backward()
    assert [facts(tensor) for tensor in read] == expected


def test_two_regions_share_a_storage_and_the_first_to_commit_pays(make_engine: Make) -> None:
    engine = make_engine()
    x = torch.randn(32, requires_grad=True)
    h = x * 1
    with engine.region("late", 0) as late:
        y = h.square()
    with engine.region("early", 0) as early:
        y = y + h[:16].sum() * h**3
    y = engine.commit(late, engine.commit(early, y))
    with engine.region("after", 0) as after:
        y = y + h.view(4, 8).square().sum()
    y = engine.commit(after, y)
    del h
    expected = torch.autograd.functional.jacobian(
        lambda h: (h.square() + h[:16].sum() * h**3 + h.square().sum()).sum(), x.detach()
    )
    y.sum().backward()
    assert torch.allclose(x.grad, expected, rtol=1e-4)
    modules = engine.stats().per_module
    assert {name: each.num_groups for name, each in modules.items()} == {"early": 1, "late": 1, "after": 1}
    assert modules["late"].bytes_out == modules["after"].bytes_out == 0
    assert modules["early"].bytes_out >= 128


def test_retained_and_double_backward(make_engine: Make) -> None:
    engine = make_engine()
    x = torch.linspace(-1, 1, 64, dtype=torch.float64, requires_grad=True)

    def second_derivative(region_engine: OffloadEngine | None) -> list[Tensor]:
        with opened(region_engine, "m", 0) as region:
            y = (x * 1).exp() * torch.sin(x * 2)
        y = committed(region_engine, region, y).sum()
        (first,) = torch.autograd.grad(y, x, create_graph=True)
        (again,) = torch.autograd.grad(y, x, create_graph=True)
        (second,) = torch.autograd.grad((first * again).sum(), x)
        return [first.detach(), again.detach(), second]

    assert_identical(second_derivative(engine), second_derivative(None))
    assert engine.stats().bytes_out > 0
    assert engine.stats().host_bytes == 0


class Spoil(torch.autograd.Function):
    """Its backward writes to the tensor that it saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, saved: Tensor) -> Tensor:
        ctx.save_for_backward(saved)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (saved,) = ctx.saved_tensors
        saved.add_(1)
        return grad, None


@pytest.mark.parametrize("offloads", [True, False])
def test_what_a_backward_changed_is_an_error_for_the_next(make_engine: Make, offloads: bool) -> None:
    engine = make_engine() if offloads else None
    x, data = torch.ones(8, requires_grad=True), torch.ones(8)
    with opened(engine, "m", 0) as region:
        y = Spoil.apply(x * data, data)
    y = committed(engine, region, y)
    del data
    with pytest.raises(RuntimeError, match=r"changed in place|inplace operation"):
        y.sum().backward()


def test_outputs_come_back_as_they_are_and_forward_only_passes_do_nothing(make_engine: Make) -> None:
    engine = make_engine()
    x = torch.randn(8, requires_grad=True)
    with torch.no_grad():
        with engine.region("m", 0) as region:
            y = x.exp()
        assert engine.commit(region, y, release=(x,)) is y
    with engine.region("m", 0) as region:
        y = x.detach().exp()
    assert engine.commit(region, y) is y
    with engine.region("m", 0) as region:
        y = (x * 1).exp()
    pair = (y, None)
    assert engine.stats().bytes_out == 0
    assert engine.commit(region, pair) is pair
    assert y._base is None
    assert engine.stats().bytes_out > 0
    assert x.untyped_storage().nbytes() == 32


def test_reentrant_regions_and_regions_within_regions(make_engine: Make) -> None:
    engine = make_engine()
    x = torch.randn(16, requires_grad=True)
    outer = engine.region("outer", 0)
    with outer:
        h = (x * 1).exp()
        with engine.region("inner", 0) as inner:
            h = (h * 2).sin()
        h = engine.commit(inner, h)
        with outer:
            h = (h * 3).tanh()
    h = engine.commit(outer, h)
    h.sum().backward()
    y = x.detach().clone().requires_grad_()
    (((y * 1).exp() * 2).sin() * 3).tanh().sum().backward()
    assert torch.equal(x.grad, y.grad)
    assert engine.stats().per_module["inner"].bytes_out > 0
    assert engine.stats().per_module["outer"].bytes_out > 0


def test_a_region_may_be_committed_when_what_it_saved_is_gone(make_engine: Make) -> None:
    engine = make_engine()
    x = torch.randn(8, requires_grad=True)
    with engine.region("attn_norm", 0) as region:
        y = x.exp()
        x.sin()  # its graph is gone at once, with the tensor it saved
    assert torch.equal(engine.commit(region, y), y)
    assert engine.stats().bytes_out == y.nbytes
    y.sum().backward()
    assert torch.equal(x.grad, x.exp())
