"""Offloading a plain torch model changes no gradient and leaves no trace on it."""

import copy
import gc
import pickle
from typing import Any

import pytest
import torch
from block_model import ALL, WIDTH, Model, batch, gradients, identical, offload
from torch import Tensor, nn

from nemo_rl_offload import offload_activations
from nemo_rl_offload.errors import ConfigError


def trace(model: nn.Module) -> list[Any]:
    """Everything that could be left on the modules and their classes."""
    return [
        {key: dict(value) if isinstance(value, dict) else value for key, value in vars(module).items()}
        | {"class": type(module), "class vars": dict(vars(type(module))), "call": type(module).__call__}
        for module in model.modules()
    ]


@pytest.mark.parametrize("modules", [*([each] for each in ALL), ALL])
def test_gradients_are_bit_identical_and_everything_is_counted(modules: list[str]) -> None:
    model = Model()
    expected = gradients(model, batch())
    with offload(model, modules) as active:
        assert identical(gradients(model, batch()), expected)
        assert identical(gradients(model, batch()), expected)
    stats = active.stats()
    assert stats.per_module.keys() == set(modules)
    assert all(each.bytes_out == each.bytes_in > 0 for each in stats.per_module.values())
    assert stats.host_bytes == stats.denied_bytes == stats.demand_reloads == stats.host_capacity_bytes == 0


@pytest.mark.parametrize(
    ("use_reentrant", "modules"),
    [(True, ["blocks.*"]), (False, ["blocks.*"]), (False, ["blocks.*.mlp", "blocks.*.norm"])],
)
def test_checkpointing(use_reentrant: bool, modules: list[str]) -> None:
    model = Model()
    for block in model.blocks:
        block.use_reentrant = use_reentrant
    expected = gradients(model, batch())
    with offload(model, modules) as active:
        assert identical(gradients(model, batch()), expected)
    stats = active.stats()
    assert stats.bytes_out == stats.bytes_in
    assert all(stats.per_module[each].bytes_out > 0 for each in modules)


def test_parts_of_what_is_recomputed_just_in_time_are_warned_about() -> None:
    model = Model()
    for block in model.blocks:
        block.use_reentrant = True
    expected = gradients(model, batch())
    with (
        pytest.warns(UserWarning, match="use_reentrant=True recomputes it"),
        offload(model, ["blocks.*.mlp"]) as active,
    ):
        assert identical(gradients(model, batch()), expected)
    assert active.stats().bytes_out == 0


def test_recomputed_tensors_that_nobody_keeps_are_not_copied() -> None:
    model = Model()
    with offload(model, ["blocks.*.mlp"]) as active:
        gradients(model, batch())
        plain_bytes = active.stats().bytes_out
        for block in model.blocks:
            block.use_reentrant = False
        gradients(model, batch())
    assert active.stats().bytes_out == 2 * plain_bytes


def test_the_model_carries_no_trace_while_active_and_after() -> None:
    model = Model()
    before, state = trace(model), model.state_dict()
    active = offload(model)
    gradients(model, batch())
    model.zero_grad()
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    assert model.state_dict().keys() == state.keys()
    for each in copies:
        gradients(each, batch())
    bytes_out = active.stats().bytes_out
    active.close()
    active.close()
    assert trace(model) == before
    assert identical(gradients(copies[0], batch()), gradients(model, batch()))
    assert active.stats().bytes_out == bytes_out > 0
    assert b"nemo_rl_offload" not in pickle.dumps(nn.Sequential(*model.blocks[0].mlp))


def test_an_error_restores_the_model_and_leaves_no_block() -> None:
    model = Model()
    before = trace(model)
    expected = gradients(model, batch())
    model.blocks[2].mlp[2] = nn.Linear(3, 3)
    active = offload(model)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(batch())
    gc.collect()
    assert active.stats().bytes_out > 0
    assert active.stats().host_bytes == 0
    with pytest.raises(RuntimeError, match="shapes"), active:
        model(batch())
    model.blocks[2].mlp[2] = Model().blocks[2].mlp[2]
    assert trace(model)[0]["call"] == before[0]["call"]
    assert identical(gradients(model, batch()), expected)


def test_without_gradients_nothing_happens() -> None:
    model = Model()
    with offload(model) as active:
        with torch.no_grad():
            model(batch())
        model.eval()
        with torch.inference_mode():
            model(batch())
    assert active.stats().bytes_out == active.stats().host_bytes == 0


def test_a_full_host_budget_keeps_tensors_on_the_device() -> None:
    model = Model()
    expected = gradients(model, batch())
    with offload(model, host_memory_budget="1KiB") as active:
        assert identical(gradients(model, batch()), expected)
    assert active.stats().denied_bytes > 0
    assert active.stats().peak_host_bytes <= 1024


def test_parameters_and_buffers_stay() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.rand(256, 256))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    model = nn.Sequential(nn.Linear(256, 256), Scale())
    model.requires_grad_(False)
    caught = pytest.warns(UserWarning, match="it saved no tensor of at least min_tensor_bytes=2000")
    with caught as warned, offload(model, ["0", "1"], min_tensor_bytes=2000) as active:
        model(torch.randn(1, 256, requires_grad=True)).sum().backward()
    assert len(warned) == 2
    assert active.stats().bytes_out == 0


def test_a_module_of_small_tensors_is_told_how_much_they_are() -> None:
    said = r"'first' offloaded nothing: the tensors that it saved, .*B in all, are each below min_tensor_bytes=1048576"
    model = nn.ModuleDict({"first": nn.Linear(8, 8)})
    with pytest.warns(UserWarning, match=said), offload(model, ["first"], min_tensor_bytes=1 << 20):
        model["first"](torch.randn(4, 8, requires_grad=True)).sum().backward()


def test_a_module_that_was_not_called_is_warned_about_at_the_users_line() -> None:
    with pytest.warns(UserWarning, match="'embed' offloaded nothing: no such module was called") as caught:
        offload(Model(), ["embed"]).close()
    assert caught[0].filename == __file__


def test_a_tensor_changed_in_place_names_the_module() -> None:
    class Careless(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Sequential(nn.Softplus())

        def forward(self, x: Tensor) -> Tensor:
            x = x * 1
            y = self.first[0](x)
            x.add_(1)
            return y

    model = nn.ModuleDict({"careless": Careless()})
    with offload(model, ["careless"]):
        loss = model["careless"](batch().requires_grad_()).sum()
        with pytest.raises(RuntimeError, match="saved by careless of layer careless was changed in place"):
            loss.backward()


def test_retained_graphs_and_double_backward() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1), nn.Tanh())

    def run() -> list[Tensor]:
        model.zero_grad()
        x = batch().requires_grad_()
        loss = model(x).sum()
        loss.backward(retain_graph=True)
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        grad.square().sum().backward()
        return [loss.detach(), grad.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]

    expected = run()
    with offload(model, ["*"]) as active:
        assert identical(run(), expected)
    assert active.stats().host_bytes == 0 < active.stats().bytes_out


def test_a_module_called_twice_and_a_reused_output() -> None:
    class Reuse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sigmoid())

        def forward(self, x: Tensor) -> Tensor:
            once = self.shared(x)
            return self.shared(once) * once + once.exp()

    model = Reuse()
    expected = gradients(model, batch())
    with offload(model, ["shared", "shared.1"]) as active:
        assert identical(gradients(model, batch()), expected)
    assert active.stats().per_module["shared.1"].num_groups == 2


def test_accumulated_gradients_of_changing_sizes() -> None:
    model = Model()

    def run() -> list[Tensor]:
        model.zero_grad()
        losses = [model(batch(rows, seed=rows)).square().mean() for rows in (3, 7, 1, 5)]
        for loss in (losses[2], losses[0], losses[3], losses[1]):
            loss.backward()
        return [*(p.grad.clone() for p in model.parameters())]

    expected = run()
    with offload(model) as active:
        assert identical(run(), expected)
    assert active.stats().host_bytes == 0


def test_a_backward_after_the_end_still_works() -> None:
    model = Model()
    expected = gradients(model, batch())
    model.zero_grad()
    with offload(model) as active:
        loss = model(batch()).square().mean()
    loss.backward()
    assert identical([loss.detach(), *(p.grad for p in model.parameters())], expected)
    active.close()
    assert active.stats().host_capacity_bytes == active.stats().host_bytes == 0


@pytest.mark.parametrize("host_memory_budget", ["16MiB", "1KiB"])
def test_a_second_backward_after_the_end_still_works(host_memory_budget: str) -> None:
    model = Model()
    expected = gradients(model, batch())
    model.zero_grad()
    with offload(model, host_memory_budget=host_memory_budget) as active:
        loss = model(batch()).square().mean()
        loss.backward(retain_graph=True)
    model.zero_grad()
    loss.backward()
    assert identical([loss.detach(), *(p.grad for p in model.parameters())], expected)
    active.close()
    assert active.stats().host_capacity_bytes == 0


def test_a_model_is_offloaded_once_at_a_time() -> None:
    model = Model()
    before = trace(model)
    active = offload(model, ["blocks.*"])
    with pytest.raises(ConfigError, match=r"blocks.0 is offloaded already. Close what"):
        offload(model, ["embed", "blocks.0"])
    gradients(model, batch())
    active.close()
    assert trace(model)[0]["call"] == before[0]["call"]
    gradients(model, batch())
    with offload(model, ["embed", "blocks.0"]):
        gradients(model, batch())


def test_the_model_is_on_one_supported_device() -> None:
    model = Model()
    model.embed.to("meta")
    with pytest.raises(ConfigError, match="The model is on cpu, meta"):
        offload(model)
    with pytest.raises(ConfigError, match="The model is on meta"):
        offload(Model().to("meta"))


def test_a_bad_budget_is_an_error_and_leaves_nothing() -> None:
    model = Model()
    before = trace(model)
    with pytest.raises(ConfigError, match="'much' is not a size"):
        offload(model, host_memory_budget="much")
    assert trace(model) == before


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"model": len}, "model is a builtin_function_or_method: give a torch.nn.Module"),
        ({"modules": [1]}, r"modules=\[1\]: give a list with at least one name"),
        ({"host_memory_budget": None}, "host_memory_budget=None: write a share"),
        ({"modules": "auto", "gpu_memory_budget": 5}, "gpu_memory_budget=5: give a size with its unit, like '72GiB'"),
    ],
)
def test_an_argument_of_another_type(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        offload_activations(**{"model": Model(), "modules": ["blocks.*"], **changed})


@pytest.mark.parametrize("size", ["1MiB", -1, 1.5])
def test_a_size_that_is_no_number_of_bytes(size: Any) -> None:
    with pytest.raises(ConfigError, match="give a number of bytes from 0 on"):
        offload_activations(Model(), ["blocks.*"], min_tensor_bytes=size)


def test_what_has_ended_is_not_entered_again() -> None:
    model = Model()
    with offload(model, ["blocks.*"]) as active:
        gradients(model, batch())
    with pytest.raises(ConfigError, match="Call offload_activations again"), active:
        pass


def test_nor_is_what_an_error_has_ended() -> None:
    model = Model()
    active = offload(model, ["blocks.*"])
    with pytest.raises(RuntimeError, match="of the user"), active:
        raise RuntimeError("of the user")
    with pytest.raises(ConfigError, match="Call offload_activations again"), active:
        pass
