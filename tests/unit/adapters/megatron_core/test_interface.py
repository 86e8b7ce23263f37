"""Megatron's contract for activation offloading, kept by this project's engine."""

import gc
import inspect
import types
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from megatron.core import recompute, tensor_parallel
from megatron.core.models.gpt import gpt_model
from megatron.core.pipeline_parallel import fine_grained_activation_offload as megatron_offload
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer import attention, transformer_layer
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe import experts
from torch import Tensor

from nemo_rl_offload.adapters.megatron_core.interface import (
    MEGATRONS_INTERFACE,
    OffloadInterface,
    exclude_parameters,
    forward_only,
    use_engine,
)
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


@pytest.mark.usefixtures("engine")
def test_megatrons_own_engine_sleeps_through_forward_only_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class Recorder:
        disable_offload = staticmethod(lambda: calls.append("disable"))
        enable_offload = staticmethod(lambda: calls.append("enable"))

    config = types.SimpleNamespace(fine_grained_activation_offloading=True)
    with forward_only(config):
        assert config.fine_grained_activation_offloading  # ours is in place
    monkeypatch.setattr(megatron_offload, "FineGrainedActivationOffloadingInterface", Recorder)

    def fail() -> None:
        with forward_only(config):
            assert not config.fine_grained_activation_offloading
            assert calls == ["disable"]
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert config.fine_grained_activation_offloading
    assert calls == ["disable", "enable"]
    config.fine_grained_activation_offloading = False
    with forward_only(config):
        assert not config.fine_grained_activation_offloading
    assert not config.fine_grained_activation_offloading
    assert calls == ["disable", "enable"]


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
        after = {name: stats.bytes_out for name, stats in engine.stats().per_module.items()}
        return {name: after.get(name, 0) - before.get(name, 0) for name in modules}

    assert run(("core_attn",)) == {"core_attn": 0}
    assert run(("core_attn", "attn_proj")) == {"core_attn": 0, "attn_proj": 16}


def test_what_shared_experts_leave_to_the_router(engine: OffloadEngine) -> None:
    def forward(name: str) -> torch.Tensor:
        manager = OffloadInterface(True, x := activation(), name)
        with manager as inner:
            y = inner * inner
        return manager.group_offload(y * x).sum()  # type: ignore[no-any-return]

    forward("shared_experts").backward()
    assert engine.stats().bytes_out == 0
    forward("mlp_fc1").backward()
    assert engine.stats().bytes_out == 16


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
    OffloadInterface.init_chunk_handler(1, 2, 1, 1, 0, 1.0)
    for number in range(2):
        manager = OffloadInterface(True, activation(), "moe_act")
        assert str(manager._region) == f"moe_act of layer 1.{number}"
    OffloadInterface.init_chunk_handler(0, 1, None, 1, 0, 1.0)
    OffloadInterface.reset()
    use_engine(None)
    OffloadInterface.reset()
    OffloadInterface.mark_not_offload(torch.ones(1))


def test_replay_delays_only_what_asks_for_it(engine: OffloadEngine) -> None:
    def commit(*, delay_offload: bool) -> Tensor:
        x = activation()
        manager = OffloadInterface(True, x, "expert_fc1")
        with manager:
            y = x * x
        assert manager.group_offload(y, delay_offload=delay_offload) is y
        return y

    first = commit(delay_offload=True)  # not in a replay
    assert engine.stats().bytes_out == 16
    OffloadInterface.enter_replay()
    second = commit(delay_offload=False)
    assert engine.stats().bytes_out == 32
    third = commit(delay_offload=True)
    assert engine.stats().bytes_out == 32
    OffloadInterface.flush_delayed_groups()
    OffloadInterface.exit_replay()
    assert engine.stats().bytes_out == 48
    for y in (third, second, first):
        y.sum().backward()
    assert engine.stats().bytes_in == 48
    OffloadInterface.flush_delayed_groups()
    assert engine.stats().host_bytes == 0


@pytest.mark.parametrize("forget", [OffloadInterface.reset, OffloadInterface.reset_instance])
def test_a_delayed_group_does_not_outlive_its_step(forget: Callable[[], None], engine: OffloadEngine) -> None:
    OffloadInterface.enter_replay()
    x = activation()
    manager = OffloadInterface(True, x, "expert_fc1")
    with manager:
        y = x * x
    alive = weakref.ref(manager.group_offload(y, delay_offload=True))
    del y
    forget()
    assert alive() is None
    OffloadInterface.flush_delayed_groups()
    assert engine.stats().bytes_out == 0
    OffloadInterface.reset_instance()
    squared(activation()).sum().backward()
    assert engine.stats().bytes_out == 16


def test_every_call_of_megatrons_interface_is_there() -> None:
    names = {name for name in vars(MEGATRONS_INTERFACE) if not name.startswith("_")} | {"group_offload"}
    assert names <= set(dir(OffloadInterface))
    for name in names:
        own = inspect.signature(getattr(MEGATRONS_INTERFACE, name)).parameters
        ours = inspect.signature(getattr(OffloadInterface, name)).parameters
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in ours.values())
        assert takes_any or list(own) == list(ours), name


def test_records_pass_tensors_and_gradients_through(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[str] = []
    monkeypatch.setattr(OffloadInterface, "forward_record", lambda: recorded.append("recorded"))
    x = activation()
    assert OffloadInterface.backward_record(x) is x
    assert recorded == []
    (x * 3).sum().backward()
    assert recorded == ["recorded"]
    constant = torch.ones(2)
    assert OffloadInterface.backward_record(constant) is constant
    with OffloadInterface.get_context(True):
        pass


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("modules", [("attn_norm",), ("mlp_norm",)])
def test_a_recomputed_layer_offloads_its_input(modules: tuple[str, ...], engine: OffloadEngine) -> None:
    use_engine(engine, modules)
    table, seen = torch.full((4,), 3.0), []

    def layer(x: Tensor, table: Tensor, unused: None) -> tuple[Tensor, None]:
        seen.append(engine.stats().bytes_in)
        return squared(x, name="mlp_norm", flag="mlp_norm" in modules) * table, None

    leaf = torch.arange(4.0, requires_grad=True)
    x = leaf * 2
    y, _ = recompute.tensor_parallel.checkpoint(layer, False, x, table, None)
    del x
    moved = 16 if modules == ("attn_norm",) else 0  # neither the table nor what is recomputed
    assert engine.stats().bytes_out == moved
    y.sum().backward()
    assert torch.equal(leaf.grad, 24 * torch.arange(4.0))
    assert engine.stats().bytes_in == engine.stats().bytes_out == moved
    assert seen == [0, moved]
    assert recompute.tensor_parallel.random is tensor_parallel.random


def test_it_is_bound_wherever_megatron_bound_its_own(engine: OffloadEngine) -> None:
    assert megatron_offload.FineGrainedActivationOffloadingInterface is OffloadInterface
    for module in (schedules, attention, experts, gpt_model):
        bound = [value for value in vars(module).values() if value is OffloadInterface]
        assert bound, module.__name__


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("modules", [("mlp_norm",), ("mlp_fc1",), ("mlp_act",)])
def test_a_recomputed_dense_mlp_offloads_its_input(
    fused: bool, modules: tuple[str, ...], engine: OffloadEngine
) -> None:
    class Squared(MLP):
        input_module = "mlp_fc1" if fused else "mlp_norm"

        def __init__(self) -> None:
            torch.nn.Module.__init__(self)

        def forward(self, x: Tensor, padding_mask: None) -> tuple[Tensor, None]:
            assert padding_mask is None
            return squared(x, name="mlp_act", flag="mlp_act" in modules), None

    use_engine(engine, modules)
    leaf = torch.arange(4.0, requires_grad=True)
    x = leaf * 2
    checkpoint = transformer_layer.tensor_parallel.checkpoint
    y, _ = checkpoint(partial(Squared(), padding_mask=None), False, x)
    del x
    moved = 16 if modules == ("mlp_fc1" if fused else "mlp_norm",) else 0
    assert engine.stats().bytes_out == moved
    y.sum().backward()
    assert torch.equal(leaf.grad, 8 * torch.arange(4.0))
    assert engine.stats().bytes_in == engine.stats().bytes_out == moved
    whole = checkpoint(lambda x: squared(x, name="mlp_act", flag=False), False, leaf * 2)
    assert engine.stats().bytes_out == moved, "no dense MLP"
    whole.sum().backward()
