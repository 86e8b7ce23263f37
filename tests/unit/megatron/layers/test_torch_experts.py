"""The linear of a group of experts against one product per expert."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.megatron.layers.torch_experts import (
    TorchColumnParallelGroupedLinear,
    TorchGroupedLinear,
    TorchRowParallelGroupedLinear,
    expert_stack,
)

IN, OUT = 4, 8  # grouped_mm wants rows of whole 16 bytes


def make_linear(
    num_experts: int,
    *,
    bias: bool = False,
    expert_tensor_parallel_size: int = 1,
    moe_expert_rank_capacity_factor: float | None = None,
    moe_ffn_hidden_size: int = OUT,
    linear: type[TorchGroupedLinear] = TorchColumnParallelGroupedLinear,
) -> TorchGroupedLinear:
    config: Any = SimpleNamespace(
        use_cpu_initialization=True,
        params_dtype=torch.float32,
        expert_model_parallel_size=1,
        expert_tensor_parallel_size=expert_tensor_parallel_size,
        tensor_model_parallel_size=1,
        moe_ffn_hidden_size=moe_ffn_hidden_size,
        moe_expert_rank_capacity_factor=moe_expert_rank_capacity_factor,
    )
    groups = SimpleNamespace(expt_tp=SimpleNamespace(size=lambda: expert_tensor_parallel_size))
    torch.manual_seed(0)
    return linear(
        num_experts,
        IN,
        OUT,
        config=config,
        init_method=torch.nn.init.normal_,
        bias=bias,
        pg_collection=groups,
    )


def experts_of(linear: TorchGroupedLinear) -> tuple[Tensor, ...]:
    return tuple(getattr(linear, f"weight{expert}") for expert in range(linear.num_local_experts))


@st.composite
def spaced(draw: st.DrawFn) -> tuple[tuple[Tensor, ...], bool]:
    """Experts cut from one storage at drawn distances, and whether these are equal and leave no overlap."""
    gaps = draw(st.lists(st.integers(0, 5), min_size=1, max_size=4))
    storage, offset, weights = torch.randn(512), draw(st.integers(0, 5)), []
    for gap in [*gaps, 0]:
        weights.append(storage[offset : offset + OUT * IN].view(OUT, IN))
        offset += OUT * IN + gap
    return tuple(weights), len(set(gaps)) == 1


@settings(max_examples=60, deadline=None)
@given(spaced(), st.permutations(range(3)))
def test_stack_is_a_view_where_experts_lie_equally_spaced(
    case: tuple[tuple[Tensor, ...], bool], order: Sequence[int]
) -> None:
    weights, evenly = case
    stack = expert_stack(weights)
    assert torch.equal(stack, torch.stack(weights))
    assert (stack.untyped_storage().data_ptr() == weights[0].untyped_storage().data_ptr()) == evenly
    if len(weights) > 2:
        shuffled = tuple(weights[index] for index in order)
        assert torch.equal(expert_stack(shuffled), torch.stack(shuffled))


def test_stack_of_separate_storages_and_of_one_expert() -> None:
    weights = tuple(torch.randn(OUT, IN) for _ in range(3))
    assert torch.equal(expert_stack(weights), torch.stack(weights))
    one = expert_stack(weights[:1])
    assert one.shape == (1, OUT, IN)
    assert one.data_ptr() == weights[0].data_ptr()


def test_a_new_layer_is_one_storage_registered_last_expert_first() -> None:
    linear = make_linear(3)
    assert [name for name, _ in linear.named_parameters()] == ["weight2", "weight1", "weight0"]
    assert expert_stack(experts_of(linear)).data_ptr() == linear.weight0.data_ptr()


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=5).filter(lambda counts: sum(counts) > 0),
    st.booleans(),
    st.integers(0, 1000),
)
def test_equals_one_product_per_expert(tokens_per_expert: list[int], separate: bool, seed: int) -> None:
    linear = make_linear(len(tokens_per_expert))
    if separate:
        for name, weight in list(linear.named_parameters()):
            setattr(linear, name, torch.nn.Parameter(weight.detach().clone()))
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(tokens_per_expert), IN, generator=generator).requires_grad_()
    upstream = torch.randn(sum(tokens_per_expert), OUT, generator=generator)
    weights = experts_of(linear)
    output, bias = linear(x, tokens_per_expert)
    assert bias is None
    gradients = torch.autograd.grad(output, (x, *weights), upstream)
    pieces = x.split(tokens_per_expert)
    expected = torch.cat([piece @ weight.T for piece, weight in zip(pieces, weights, strict=True)])
    expected_gradients = torch.autograd.grad(expected, (x, *weights), upstream)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(gradients, expected_gradients)


def test_no_token_at_all() -> None:
    linear = make_linear(2)
    x = torch.zeros(0, IN, requires_grad=True)
    output, _ = linear(x, [0, 0])
    assert output.shape == (0, OUT)
    output.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == (0, IN)
    assert all(torch.equal(weight.grad, torch.zeros(OUT, IN)) for weight in experts_of(linear))


def test_experts_without_a_token_have_no_gradient_where_the_product_leaves_theirs_unwritten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A fake of what Blackwell's kernel does."""
    product = torch.nn.functional.grouped_mm

    def leaves_out(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
        result = product(a, b, offs=offs)
        if result.dim() == 3:
            result[offs.diff(prepend=offs.new_zeros(1)) == 0] = torch.nan
        return result

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", leaves_out)
    linear = make_linear(4)
    y, _ = linear(torch.randn(5, IN), [0, 3, 0, 2])
    y.sum().backward()
    gradients = [weight.grad for weight in experts_of(linear)]
    assert [gradient is not None and bool(gradient.any()) for gradient in gradients] == [False, True, False, True]
    assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients)


def test_saves_the_parameters_themselves() -> None:
    linear = make_linear(3)
    saved: list[Tensor] = []
    x = torch.randn(6, IN, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        linear(x, [1, 2, 3])
    floating = [tensor for tensor in saved if tensor.is_floating_point()]
    assert {id(tensor) for tensor in floating} == {id(x), *map(id, experts_of(linear))}


def test_refuses_biases_behind_buffers_of_a_fixed_size() -> None:
    with pytest.raises(ConfigError, match="moe_expert_rank_capacity_factor"):
        make_linear(2, bias=True, moe_expert_rank_capacity_factor=1.5)


def test_refuses_parts_that_grouped_products_do_not_take() -> None:
    with pytest.raises(
        ConfigError, match=r"expert_tensor_parallel_size: 2 ranks .* rows of 24 bytes .* multiples of 16"
    ):
        make_linear(2, expert_tensor_parallel_size=2, moe_ffn_hidden_size=12)


@pytest.mark.parametrize("linear", [TorchColumnParallelGroupedLinear, TorchRowParallelGroupedLinear])
@pytest.mark.parametrize("expert_tensor_parallel_size", [1, 2])
def test_a_rank_has_its_part_of_each_expert(linear: type[TorchGroupedLinear], expert_tensor_parallel_size: int) -> None:
    made = make_linear(3, bias=True, linear=linear, expert_tensor_parallel_size=expert_tensor_parallel_size)
    is_column = linear is TorchColumnParallelGroupedLinear
    rows, columns = OUT // expert_tensor_parallel_size, IN // expert_tensor_parallel_size
    assert made.weight1.shape == ((rows, IN) if is_column else (OUT, columns))
    assert made.bias1.shape == ((rows,) if is_column else (OUT,))
    assert made.weight1.partition_dim == (0 if is_column else 1)
    assert getattr(made.bias1, "tensor_model_parallel", False) == is_column
    assert made.weight1.allreduce == made.bias1.allreduce == (expert_tensor_parallel_size == 1)


def test_the_first_linear_adds_each_experts_bias() -> None:
    linear = make_linear(3, bias=True)
    for expert in range(3):
        torch.nn.init.normal_(getattr(linear, f"bias{expert}"))
    x, counts = torch.randn(6, IN), [1, 0, 5]
    output, bias = linear(x, counts)
    biases = (linear.bias0, linear.bias1, linear.bias2)
    parts = zip(x.split(counts), experts_of(linear), biases, strict=True)
    torch.testing.assert_close(output, torch.cat([rows @ weight.T + added for rows, weight, added in parts]))
    assert bias is None
