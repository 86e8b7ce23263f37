"""Offloading a plain torch model in several threads, and with compiled submodules."""

import threading
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from block_model import Model, batch, gradients, identical, offload
from patience import PATIENCE_S


def test_two_models_in_two_threads_are_independent() -> None:
    models = [Model(), Model(2)]
    expected = [gradients(model, batch()) for model in models]
    start = threading.Barrier(2)
    got: list[bool] = []

    def train(index: int) -> None:
        with offload(models[index]) as active:
            start.wait()
            same = [identical(gradients(models[index], batch()), expected[index]) for _ in range(20)]
            start.wait()
            per_pass = active.stats().per_module["blocks.*"].num_groups / 20
            got.append(all(same) and per_pass == len(models[index].blocks))

    threads = [threading.Thread(target=train, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=PATIENCE_S)
    assert got == [True, True]


def test_one_model_in_two_threads() -> None:
    model = Model()
    expected = {rows: gradients(model, batch(rows)) for rows in (3, 5)}
    got: dict[int, bool] = {}

    def train(rows: int) -> None:
        same = []
        for _ in range(20):
            loss = model(batch(rows)).square().mean()
            same.append(identical([loss.detach(), *torch.autograd.grad(loss, [*model.parameters()])], expected[rows]))
        got[rows] = all(same)

    with offload(model) as active:
        threads = [threading.Thread(target=train, args=(rows,)) for rows in expected]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=PATIENCE_S)
    assert got == {3: True, 5: True}
    assert active.stats().host_bytes == 0


def compile_in_place(model: Model) -> None:
    for block in model.blocks:
        block.mlp.compile(backend="aot_eager")


def compile_wrapped(model: Model) -> None:
    for block in model.blocks:
        block.mlp = torch.compile(block.mlp, backend="aot_eager")


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("compile_some", [compile_in_place, compile_wrapped])
def test_compiled_submodules(compile_some: Callable[[Model], None]) -> None:
    model = Model()
    compile_some(model)
    expected = gradients(model, batch())
    with offload(model, ["blocks.*.mlp", "blocks.*.norm"]) as active:
        assert identical(gradients(model, batch()), expected)
        assert identical(gradients(model, batch()), expected)
    assert active.stats().bytes_in == active.stats().bytes_out
    assert all(active.stats().per_module[each].bytes_out > 0 for each in ("blocks.*.mlp", "blocks.*.norm"))


@pytest.mark.usefixtures("_fresh_compiler")
def test_a_model_compiled_as_a_whole_is_warned_about() -> None:
    model = Model()
    compiled = torch.compile(model, backend="aot_eager")
    expected = gradients(compiled, batch())
    with pytest.warns(UserWarning, match="inside of compiled code"), offload(model, ["blocks.*"]):
        assert identical(gradients(compiled, batch()), expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert identical(gradients(compiled, batch()), expected)
