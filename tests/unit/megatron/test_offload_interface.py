"""Megatron's contract for activation offloading, kept by this project's engine."""

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from megatron.core.models.gpt import gpt_model
from megatron.core.pipeline_parallel import fine_grained_activation_offload as megatron_offload
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer import attention
from megatron.core.transformer.moe import experts
from torch import Tensor

from nemo_rl_offload.megatron.offload_interface import OffloadInterface, exclude_parameters, use_engine
from nemo_rl_offload.offload import HostBackend, OffloadEngine


@pytest.fixture
def engine() -> Iterator[OffloadEngine]:
    engine = OffloadEngine(HostBackend(), host_memory_budget_bytes=1 << 20, min_tensor_bytes=0)
    use_engine(engine)
    yield engine
    use_engine(None)
    OffloadInterface.enable_offload()
    engine.close()


def squared(x: Tensor, *, flag: bool = True, name: str = "moe_act", wrap: Callable[[Tensor], Any] = lambda y: y) -> Any:
    """x^2 of an activation, which autograd saves, in a region."""
    manager = OffloadInterface(flag, x, name)
    with manager as inner:
        y = inner * inner
    return manager.group_offload(wrap(y), forced_released_tensors=[x], delay_offload=False)


def activation() -> Tensor:
    return torch.arange(4.0, requires_grad=True) * 2


def test_a_region_moves_what_is_saved_and_gives_it_back(engine: OffloadEngine) -> None:
    leaf = torch.arange(4.0, requires_grad=True)
    y = squared(leaf * 2)
    assert engine.stats().bytes_out == 16
    assert engine.stats().host_bytes > 0
    y.sum().backward()
    assert torch.equal(leaf.grad, 8 * torch.arange(4.0))
    assert engine.stats().bytes_in == 16
    assert engine.stats().host_bytes == 0


@pytest.mark.parametrize("flag", [True, False])
def test_without_flag_or_engine_everything_passes_through(flag: bool, engine: OffloadEngine) -> None:
    if flag:
        use_engine(None)
    x = activation()
    manager = OffloadInterface(flag, x, "core_attn")
    with manager as inner:
        assert inner is x
        y = inner * inner
    assert manager.group_offload(y) is y
    assert engine.stats().bytes_out == 0


@pytest.mark.parametrize("wrap", [lambda y: y, lambda y: (y, None), lambda y: [y, None], lambda y: (y, torch.ones(1))])
def test_outputs_of_any_shape_come_back_themselves(wrap: Callable[[Tensor], Any], engine: OffloadEngine) -> None:
    outputs = []

    def remember(y: Tensor) -> Any:
        outputs.append(wrap(y))
        return outputs[0]

    result = squared(activation(), wrap=remember)
    assert result is outputs[0]
    assert engine.stats().bytes_out == 16
    (result if isinstance(result, Tensor) else result[0]).sum().backward()
    assert engine.stats().bytes_in == 16


def test_disable_and_enable(engine: OffloadEngine) -> None:
    OffloadInterface.disable_offload()
    squared(activation()).sum().backward()
    assert engine.stats().bytes_out == 0
    OffloadInterface.enable_offload()
    squared(activation()).sum().backward()
    assert engine.stats().bytes_out == 16


def test_a_manager_does_not_keep_the_activation(engine: OffloadEngine) -> None:
    x = torch.ones(4) * 2
    alive = weakref.ref(x)
    manager = OffloadInterface(True, x, "mlp_norm")
    with manager as inner:
        y = inner + 1
    del x, inner
    gc.collect()
    assert alive() is None
    assert manager.group_offload(y) is y


def test_commits_are_neither_nested_nor_adjacent(engine: OffloadEngine) -> None:
    leaf = torch.arange(1.0, 5.0, requires_grad=True)
    x = leaf * 2
    norm = OffloadInterface(True, x, "attn_norm")
    with norm as inner:
        y = inner * inner
    z = squared(y, name="core_attn")
    out = norm.group_offload(z + 1)
    out.sum().backward()
    assert torch.equal(leaf.grad, 64 * torch.arange(1.0, 5.0) ** 3)
    modules = engine.stats().per_module
    assert modules["attn_norm"].bytes_in == modules["core_attn"].bytes_in == 16
    assert engine.stats().host_bytes == 0


def test_an_exception_in_a_region_leaves_nothing(engine: OffloadEngine) -> None:
    manager = OffloadInterface(True, activation(), "core_attn")

    def fail() -> None:
        with manager as inner:
            _ = inner * inner
            raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        fail()
    gc.collect()
    assert engine.stats().host_bytes == 0
    squared(activation()).sum().backward()
    assert engine.stats().bytes_in == 16


def test_what_attention_leaves_to_the_projection(engine: OffloadEngine) -> None:
    def run(modules: tuple[str, ...]) -> dict[str, int]:
        use_engine(engine, modules)
        before = {name: stats.bytes_out for name, stats in engine.stats().per_module.items()}
        attend = OffloadInterface(True, activation(), "core_attn")
        with attend as inner:
            y = inner.exp()  # saved by the node that made it, as attention's output is
        y = attend.group_offload(y)
        squared(y, flag="attn_proj" in modules, name="attn_proj").sum().backward()
        after = engine.stats().per_module
        return {name: after[name].bytes_out - before.get(name, 0) for name in modules}

    assert run(("core_attn",)) == {"core_attn": 16}
    assert run(("core_attn", "attn_proj")) == {"core_attn": 0, "attn_proj": 16}


def test_marked_tensors_and_parameters_stay(engine: OffloadEngine) -> None:
    marked = activation()
    OffloadInterface.mark_not_offload(marked)
    OffloadInterface.mark_not_offload(None)
    squared(marked).sum().backward()
    linear = torch.nn.Linear(4, 4)
    linear.register_buffer("table", torch.ones(4))
    exclude_parameters(engine, [linear])
    manager = OffloadInterface(True, marked, "mlp_fc1")
    x = torch.ones(4, requires_grad=True)
    with manager:
        y = x * linear.table + linear.bias.view(2, 2).flatten() * linear.table
    manager.group_offload(y).sum().backward()
    assert engine.stats().bytes_out == 0


def test_calls_of_schedules_and_models(engine: OffloadEngine) -> None:
    squared(activation())
    OffloadInterface.init_chunk_handler(
        pp_rank=0,
        vp_size=1,
        vp_stage=None,
        min_offloaded_tensor_size=1,
        delta_offload_bytes_across_pp_ranks=0,
        activation_offload_fraction=1.0,
        max_inflight_offloads=None,
    )
    OffloadInterface.init_chunk_handler(0, 1, None, 1, 0, 1.0)
    manager = OffloadInterface(True, activation(), "moe_act")
    assert manager._region is not None
    assert str(manager._region) == "moe_act of layer 0"  # occurrences are counted anew in each forward
    OffloadInterface.reset()
    use_engine(None)
    OffloadInterface.reset()
    OffloadInterface.mark_not_offload(torch.ones(1))


def test_it_is_bound_wherever_megatron_bound_its_own(engine: OffloadEngine) -> None:
    assert megatron_offload.FineGrainedActivationOffloadingInterface is OffloadInterface
    for module in (schedules, attention, experts, gpt_model):
        bound = [value for value in vars(module).values() if value is OffloadInterface]
        assert bound, module.__name__
