"""An interrupt, or any exception, in the middle of the engine's work: the next step is as if it had not been."""

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from patience import PATIENCE_S
from torch import Tensor

from nemo_rl_offload.offload import HostBackend, OffloadEngine
from nemo_rl_offload.offload.arena import HostArena
from nemo_rl_offload.offload.copies import Copies
from nemo_rl_offload.offload.slots import Slot

top_hooks = torch._C._autograd._top_saved_tensors_default_hooks


def make_engine() -> OffloadEngine:
    return OffloadEngine(HostBackend(), host_memory_budget_bytes=1 << 20, min_tensor_bytes=0)


def chain(engine: OffloadEngine | None, num_layers: int = 3) -> tuple[Tensor, Tensor]:
    leaf = torch.linspace(-1, 1, 256, requires_grad=True)
    x = leaf
    for layer in range(num_layers):
        if engine is None:
            x = (x * 0.5).exp()
            continue
        with engine.region("exp", layer) as region:
            x = (x * 0.5).exp()
        x = engine.commit(region, x)
    return leaf, x.sum()


def gradient(leaf: Tensor, loss: Tensor) -> Tensor:
    loss.backward()
    assert leaf.grad is not None
    return leaf.grad


def assert_as_new(engine: OffloadEngine, pending: tuple[Tensor, Tensor]) -> None:
    expected = gradient(*chain(None))
    assert torch.equal(gradient(*pending), expected)
    assert torch.equal(gradient(*chain(engine)), expected)
    stats = engine.stats()
    assert (stats.host_bytes, engine._slots, engine._alive, engine._copies.resident_bytes) == (0, {}, {}, 0)
    assert top_hooks(True) is None
    got = []
    other = threading.Thread(target=lambda: got.append(engine.stats()))
    other.start()
    other.join(timeout=PATIENCE_S)
    assert got, "another thread waits for the lock"


PLACES = [
    (HostBackend, "copy_out"),
    (HostBackend, "copy_in"),
    (HostBackend, "done"),
    (HostArena, "reserve"),
    (HostArena, "release"),
    (Copies, "offload"),
    (Copies, "reload"),
    (Copies, "let_go"),
    (Copies, "_drop_oldest"),
    (Copies, "rebuild"),
    (Slot, "take_storage_of"),
]


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("owner", "name"), PLACES, ids=lambda each: getattr(each, "__name__", each))
def test_an_exception_at_a_place_leaves_nothing(
    owner: type, name: str, after: bool, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    original: Callable[..., Any] = getattr(owner, name)
    num_raised = 0
    for at in range(4):
        engine = make_engine()
        for _ in range(2):
            gradient(*chain(engine))
        pending = chain(engine)
        calls = itertools.count()

        def raising(*args: Any, at: int = at, calls: Any = calls) -> Any:
            is_here = next(calls) in (at, at + 1)  # the second time where the engine mends itself
            if is_here and not after:
                raise error
            result = original(*args)
            if is_here:
                raise error
            return result

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, raising)
            for _ in range(3):
                try:
                    gradient(*chain(engine))
                except error:
                    num_raised += 1
        assert_as_new(engine, pending)
        engine.close()
    assert num_raised > 0 or name == "rebuild"


def test_hooks_of_a_region_that_was_never_left_are_taken_off() -> None:
    engine = make_engine()
    pending = chain(engine)

    def interrupted() -> None:
        engine.region("exp", 0).__enter__()

    interrupted()
    assert top_hooks(True) is not None
    assert_as_new(engine, pending)


def test_regions_in_generators_stay_open_while_these_wait() -> None:
    engine = make_engine()
    leaf = torch.linspace(-1, 1, 256, requires_grad=True)

    def outer() -> Any:
        with engine.region("exp", 0) as region:
            x = leaf.exp()
            yield
            x = x.exp()
        yield engine.commit(region, x)

    generator = outer()
    next(generator)
    with engine.region("exp", 1) as region:
        y = leaf.exp()
    y = engine.commit(region, y)
    x = next(generator)
    assert top_hooks(True) is None
    assert engine.stats().bytes_out == 3 * leaf.nbytes
    (x.sum() + y.sum()).backward()
    assert engine.stats().host_bytes == 0


def test_nothing_in_python_runs_when_a_slot_dies() -> None:
    assert not hasattr(Slot, "__del__")
    engine = make_engine()
    leaf, loss = chain(engine)
    assert engine._alive
    notices = {type(ref.__callback__).__name__ for ref in engine._alive.values() if ref.__callback__ is not None}
    assert notices == {"builtin_function_or_method"}
    gradient(leaf, loss)


def test_an_engine_used_inside_of_its_own_work_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    monkeypatch.setattr(engine._backend, "copy_out", lambda moves: engine.stats(), raising=False)
    with pytest.raises(RuntimeError, match="inside of its own work"):
        chain(engine)
