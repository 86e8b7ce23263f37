"""Detours around calls: who takes them, in which order, and that nothing is left."""

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nemo_rl_offload.adapters.call_hooks import is_watched, watch

CALL = vars(nn.Module)["__call__"]


@pytest.fixture(autouse=True)
def _restore_call() -> Iterator[None]:
    yield
    nn.Module.__call__ = CALL


class Loud(nn.Module):
    """Has a `__call__` of its own, as transformers' layers do, and a method that it calls itself."""

    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x) + 100

    def forward(self, x: Tensor) -> Tensor:
        return self.shift(x)

    def shift(self, x: Tensor) -> Tensor:
        return x + 1


class Louder(Loud):
    """Inherits both."""


def note(log: list[str], name: str) -> Any:
    class Note:
        def enter(self, running: Any, args: Any, kwargs: Any) -> None:
            assert running.locked()
            log.append(f"{name} in")

        def leave(self, entered: None, output: Any) -> None:
            log.append(f"{name} out")

        def fail(self, entered: None) -> None:
            log.append(f"{name} failed")

    return Note()


def test_only_the_watched_instance_takes_the_detour() -> None:
    log: list[str] = []
    watched, other = nn.ReLU(), nn.ReLU()
    end = watch(watched, "__call__", (note(log, "a"), note(log, "b")))
    assert is_watched(watched, "__call__")
    assert not is_watched(other, "__call__")
    other(torch.ones(1))
    assert log == []
    assert torch.equal(watched(torch.ones(1)), torch.ones(1))
    assert log == ["a in", "b in", "b out", "a out"]
    end()
    watched(torch.ones(1))
    assert len(log) == 4
    assert vars(nn.Module)["__call__"] is CALL


def test_the_detour_goes_around_an_overridden_call_and_any_method() -> None:
    log: list[str] = []
    module = Louder()
    before = dict(vars(Loud))
    ends = [watch(module, "__call__", (note(log, "call"),)), watch(module, "shift", (note(log, "shift"),))]
    assert vars(Loud) != before
    assert module(torch.zeros(1)).item() == 101
    assert log == ["call in", "shift in", "shift out", "call out"]
    for end in ends:
        end()
    assert vars(Loud) == before
    assert vars(nn.Module)["__call__"] is CALL


def test_watching_ends_in_any_order() -> None:
    first, second = nn.ReLU(), nn.ReLU()
    end_first, end_second = watch(first, "__call__", ()), watch(second, "__call__", ())
    end_first()
    assert not is_watched(first, "__call__")
    assert is_watched(second, "__call__")
    assert vars(nn.Module)["__call__"] is not CALL
    end_second()
    assert vars(nn.Module)["__call__"] is CALL


def test_a_replacement_made_on_top_of_ours_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    module, log = nn.ReLU(), []
    end = watch(module, "__call__", (note(log, "ours"),))
    ours = vars(nn.Module)["__call__"]

    def theirs(self: nn.Module, *args: Any) -> Any:
        log.append("theirs")
        return ours(self, *args)

    monkeypatch.setattr(nn.Module, "__call__", theirs)
    end()
    assert vars(nn.Module)["__call__"] is theirs
    module(torch.ones(1))
    assert log == ["theirs"]
    watch(module, "__call__", (note(log, "again"),))()
    assert vars(nn.Module)["__call__"] is theirs


def test_copies_of_a_watched_module_are_not_watched() -> None:
    module = nn.Linear(2, 2)
    state = {key: value for key, value in vars(module).items() if not key.startswith("_")}
    end = watch(module, "__call__", (note([], "a"),))
    copied, pickled = copy.deepcopy(module), pickle.loads(pickle.dumps(module))
    assert not is_watched(copied, "__call__")
    assert not is_watched(pickled, "__call__")
    assert {key: value for key, value in vars(module).items() if not key.startswith("_")} == state
    end()


def test_code_that_is_being_compiled_is_left_alone() -> None:
    log: list[str] = []
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    end = watch(model[1], "__call__", (note(log, "a"),))
    x = torch.randn(3, 2)
    assert torch.equal(compiled(x), torch.relu(model[0](x)))
    assert log == []
    end()
