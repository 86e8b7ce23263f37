"""A torch optimizer whose state waits on the host: its bits, its waits, its time and its memory."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from simulated_backend import SimulatedBackend
from torch import Tensor

from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.offload.arena import HostArena
from nemo_rl_offload.offload.backends.cuda import CudaBackend
from nemo_rl_offload.offload.backends.host import HostBackend
from nemo_rl_offload.policy.residency import streamed_optimizer
from nemo_rl_offload.policy.residency.slabs import Segment, cut
from nemo_rl_offload.policy.residency.streamed_optimizer import Parameter, StreamedOptimizer, state_of

NUM_CASES = 25
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
ADAMW = partial(torch.optim.AdamW, lr=1e-2)


class Case(NamedTuple):
    """A model's weights and an optimizer of main weights, of which some are copies."""

    shapes: list[tuple[int, ...]]
    make: Callable[..., torch.optim.Optimizer]
    cut: int
    """Of the parameters, so many are in the first of two groups."""
    copies: list[bool]
    share: float
    bucket_bytes: int
    least_slab: int
    without_gradient: float


def make_case(seed: int) -> Case:
    chance = random.Random(seed)
    shapes: list[tuple[int, ...]] = [
        (chance.randint(1, 90), chance.randint(1, 90)) if chance.random() < 0.7 else (chance.randint(0, 400),)
        for _ in range(chance.randint(1, 8))
    ]
    makes: list[Callable[..., torch.optim.Optimizer]] = [
        ADAMW,
        partial(torch.optim.Adam, lr=1e-2, weight_decay=0.1),
        partial(torch.optim.SGD, lr=1e-1),
        partial(torch.optim.SGD, lr=1e-1, momentum=0.9, weight_decay=0.1),
    ]
    return Case(
        shapes,
        chance.choice(makes),
        chance.randint(0, len(shapes)),
        [chance.random() < 0.7 for _ in shapes],
        chance.choice([1.0, 1.0, 0.6, 0.3, 0.0]),
        chance.choice([1, 1 << 12, 1 << 14, 1 << 20]),
        chance.choice([1 << 9, 1 << 12, 1 << 20]),
        chance.choice([0.0, 0.3]),
    )


class Trained(NamedTuple):
    weights: list[Tensor]
    models: list[Tensor]
    state: dict[str, Any]
    streamed: StreamedOptimizer | None


def train(case: Case, arena: HostArena | None, *, num_steps: int = 3) -> Trained:
    """Steps with random gradients; a model's weights are bfloat16 copies of main weights."""
    random_numbers = torch.Generator().manual_seed(7)
    weights = [torch.randn(shape, generator=random_numbers) for shape in case.shapes]
    models = [weight.bfloat16() for weight in weights]
    optimizer = case.make(
        [{"params": weights[: case.cut], "weight_decay": 0.1}, {"params": weights[case.cut :], "weight_decay": 0.0}]
    )
    streamed = None
    if arena is not None:
        parameters = [
            Parameter(weight, int(index >= case.cut), partial(model.view, -1) if is_copy else None)
            for index, (weight, model, is_copy) in enumerate(zip(weights, models, case.copies, strict=True))
        ]
        streamed = StreamedOptimizer(
            optimizer,
            arena,
            parameters,
            share=case.share,
            bucket_bytes=case.bucket_bytes,
            least_slab=case.least_slab,
        )
    gone = set() if streamed is None else {id(weight) for weight, _ in streamed.main_weights}
    for _ in range(num_steps):
        for weight in weights:
            has_gradient = torch.rand((), generator=random_numbers) >= case.without_gradient
            gradient = torch.randn(weight.shape, generator=random_numbers)
            weight.grad = gradient if has_gradient else None
        optimizer.step()
        for weight, model, is_copy in zip(weights, models, case.copies, strict=True):
            if is_copy and id(weight) not in gone:
                model.copy_(weight)
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
    return Trained(weights, models, optimizer.state_dict(), streamed)


def differences(found: Trained, expected: Trained) -> Iterator[str]:
    for name in ("weights", "models"):
        pairs = zip(getattr(found, name), getattr(expected, name), strict=True)
        yield from (f"{name} {index}" for index, pair in enumerate(pairs) if not torch.equal(*pair))
    if found.state["param_groups"] != expected.state["param_groups"]:
        yield "groups"
    for number, state in expected.state["state"].items():
        for key, value in state.items():
            other = found.state["state"][number][key]
            if not (torch.equal(other, value) if torch.is_tensor(value) else other is value):
                yield f"{key} of {number}"


def faults(seed: int) -> list[str]:
    """What is wrong with a case, streamed over a device that looks for races."""
    case, backend = make_case(seed), SimulatedBackend()
    found = train(case, HostArena(backend, 1 << 30))
    return [*differences(found, train(case, None)), *backend.hazards]


@pytest.mark.parametrize("seed", range(NUM_CASES))
def test_no_bit_changes(seed: int) -> None:
    assert faults(seed) == []


@contextmanager
def without_waiting(patch: pytest.MonkeyPatch) -> Iterator[None]:
    patch.setattr(SimulatedBackend, "compute_wait", lambda self, event: None)
    yield


@contextmanager
def counting_every_bucket(patch: pytest.MonkeyPatch) -> Iterator[None]:
    original = StreamedOptimizer._update

    def update(self: StreamedOptimizer, present: Any) -> None:
        original(self, present)
        for slabs in self._slabs:
            for parameter in slabs.parameters:
                self._optimizer.state[parameter.weight].update(self._counted.get(id(parameter.weight), {}))

    patch.setattr(StreamedOptimizer, "_update", update)
    yield


@contextmanager
def shifted_gradients(patch: pytest.MonkeyPatch) -> Iterator[None]:
    original = streamed_optimizer._give_gradient

    def give(stand_in: Tensor, weight: Tensor, segment: Segment) -> bool:
        return original(stand_in, weight, segment._replace(start=0))

    patch.setattr(streamed_optimizer, "_give_gradient", give)
    yield


@contextmanager
def forgetting_the_last_bucket(patch: pytest.MonkeyPatch) -> Iterator[None]:
    patch.setattr(streamed_optimizer, "cut", lambda *args: list(cut(*args))[:-1])
    yield


@pytest.mark.parametrize(
    "plant", [without_waiting, counting_every_bucket, shifted_gradients, forgetting_the_last_bucket]
)
def test_a_planted_fault_is_found(plant: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with plant(monkeypatch):
        assert any(faults(seed) for seed in range(NUM_CASES))


def adam_on(arena: HostArena, num_elements: int, bucket_bytes: int) -> tuple[torch.optim.Optimizer, StreamedOptimizer]:
    weight = torch.randn(num_elements)
    weight.grad = torch.randn(num_elements)
    optimizer = ADAMW([weight])
    model = weight.bfloat16()
    return optimizer, StreamedOptimizer(
        optimizer, arena, [Parameter(weight, 0, lambda: model)], bucket_bytes=bucket_bytes
    )


def test_both_directions_are_busy_at_once() -> None:
    num_elements = 1 << 18
    backend = SimulatedBackend(1e6, 1e6)
    optimizer, streamed = adam_on(HostArena(backend, 1 << 30), num_elements, 12 << 10)
    start = backend.now_ms
    optimizer.step()
    assert backend.hazards == []
    one_way_ms = 12 * num_elements / 1e6
    assert streamed.host_bytes == 12 * num_elements
    assert one_way_ms < backend.now_ms - start < 1.02 * one_way_ms, "both ways one after another take twice as long"


def test_what_goes_is_a_view_of_the_arena() -> None:
    arena = HostArena(HostBackend(), 1 << 20)
    weight = torch.randn(30, 40)
    kept = weight.clone()
    optimizer = ADAMW([weight])
    streamed = StreamedOptimizer(optimizer, arena, [Parameter(weight, 0, weight.bfloat16)])
    assert torch.equal(weight, kept)
    slabs = [block.pieces[0].slab.data.untyped_storage().data_ptr() for block in arena._held]
    tensors = [weight, optimizer.state[weight]["exp_avg"], optimizer.state[weight]["exp_avg_sq"]]
    assert {tensor.untyped_storage().data_ptr() for tensor in tensors} == set(slabs)
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in tensors), "a save writes storages"
    assert streamed.host_bytes == arena.held_bytes == 12 * 1280
    (pair,) = streamed.main_weights
    assert pair[0] is weight


def test_loading_writes_into_the_memory_that_is_there() -> None:
    case = make_case(3)
    case = case._replace(make=ADAMW, share=1.0, copies=[True] * len(case.shapes), without_gradient=0.0)
    expected = train(case, None)
    weights = [torch.zeros(shape) for shape in case.shapes]
    optimizer = ADAMW([{"params": weights[: case.cut]}, {"params": weights[case.cut :]}])
    parameters = [Parameter(weight, int(index >= case.cut), weight.clone) for index, weight in enumerate(weights)]
    StreamedOptimizer(optimizer, HostArena(HostBackend(), 1 << 24), parameters)
    before = {key: value.data_ptr() for key, value in optimizer.state[weights[0]].items() if key != "step"}
    optimizer.load_state_dict(expected.state)
    assert {key: value.data_ptr() for key, value in optimizer.state[weights[0]].items() if key != "step"} == before
    assert optimizer.param_groups[0]["weight_decay"] == 0.1
    for number, weight in enumerate(weights):
        for key, value in expected.state["state"][number].items():
            assert torch.equal(optimizer.state[weight][key], value)


def test_no_room_is_said_in_numbers_and_nothing_moves() -> None:
    arena = HostArena(HostBackend(), 1 << 20)
    weight = torch.randn(1 << 18)
    optimizer = ADAMW([weight])
    address = weight.data_ptr()
    with pytest.raises(ConfigError, match=r"host_memory_budget: .* needs 3\.\d* MiB .*optimizer_offload_fraction"):
        StreamedOptimizer(optimizer, arena, [Parameter(weight, 0, weight.clone)])
    assert (weight.data_ptr(), arena.held_bytes) == (address, 0)
    assert not optimizer.state


class FusedAdam(torch.optim.Optimizer):
    """Transformer Engine's, as far as its state goes."""

    def __init__(self, weights: list[Tensor], **settings: Any) -> None:
        super().__init__(weights, {"lr": 1.0})
        self.exp_avg_dtype = self.exp_avg_sq_dtype = self.master_weight_dtype = torch.float32
        self.master_weights = self.store_param_remainders = False
        self.__dict__.update(settings)


class Adafactor(FusedAdam):
    """One that is not known."""


def test_what_each_optimizer_keeps() -> None:
    narrow, wide = torch.zeros(3, dtype=torch.bfloat16), torch.zeros(3)
    adam = (("exp_avg", torch.float32), ("exp_avg_sq", torch.float32))
    assert state_of(FusedAdam([wide]), wide) == adam
    precise = FusedAdam([wide], master_weights=True, store_param_remainders=True)
    assert state_of(precise, narrow) == (*adam, ("master_param", torch.int16))
    assert state_of(precise, wide) == (*adam, ("master_param", torch.float32))
    for other in (FusedAdam([wide], exp_avg_dtype=torch.uint8), FusedAdam([wide], capturable=True), Adafactor([wide])):
        with pytest.raises(ConfigError, match=r"optimizer_cpu_offload: .*Set it to false"):
            state_of(other, wide)


@pytest.fixture
def cuda_arena() -> Iterator[HostArena]:
    arena = HostArena(CudaBackend(), 8 << 30)
    yield arena
    torch.cuda.synchronize()
    arena.close()


def make_adam(kind: str, weights: list[Tensor]) -> Any:
    if kind == "torch":
        return ADAMW(weights)
    optimizers = pytest.importorskip("transformer_engine.pytorch.optimizers")
    if kind == "sgd":
        return optimizers.FusedSGD(weights, lr=1e-1, momentum=0.9)
    precise = {"master_weights": True, "use_decoupled_grad": True, "store_param_remainders": True}
    return optimizers.FusedAdam(weights, lr=1e-2, weight_decay=0.1, **(precise if kind == "precise" else {}))


def steps_on_device(kind: str, arena: HostArena | None) -> list[Tensor]:
    """Weights and state after four steps, and what would be the model's."""
    numbers = torch.Generator().manual_seed(3)
    dtype = torch.bfloat16 if kind == "precise" else torch.float32
    shapes = [(5000, 700), (13,), (999, 1001), (1 << 20,), (3,)]
    weights = [torch.randn(shape, generator=numbers).to("cuda", dtype) for shape in shapes]
    models = [weight.bfloat16() for weight in weights]
    optimizer = make_adam(kind, weights)
    if arena is not None:
        parameters = [
            Parameter(weight, 0, None if kind == "precise" else partial(model.view, -1))
            for weight, model in zip(weights, models, strict=True)
        ]
        streamed = StreamedOptimizer(optimizer, arena, parameters, bucket_bytes=3 << 20, least_slab=1 << 20)
        assert streamed.host_bytes > 10 * sum(weight.numel() for weight in weights) * (0.7 if kind == "sgd" else 1)
    for _ in range(4):
        for weight, model in zip(weights, models, strict=True):
            gradient = torch.randn(weight.shape, generator=numbers).cuda()
            if kind == "precise":
                weight.decoupled_grad = gradient  # type: ignore[attr-defined]
            else:
                home = weight.data
                weight.data = model.new_zeros(1, dtype=torch.float32).expand(weight.shape)
                weight.grad = gradient
                weight.data = home
        optimizer.step()
        if arena is None and kind != "precise":
            for weight, model in zip(weights, models, strict=True):
                model.copy_(weight)
    state = [value for weight in weights for value in optimizer.state[weight].values() if torch.is_tensor(value)]
    return [tensor.detach().cpu().clone() for tensor in (*weights, *models, *state)]


@pytest.mark.cuda
@needs_gpu
@pytest.mark.parametrize("kind", ["torch", "fused", "precise", "sgd"])
def test_no_bit_changes_on_a_gpu(kind: str, cuda_arena: HostArena) -> None:
    found, expected = steps_on_device(kind, cuda_arena), steps_on_device(kind, None)
    assert len(found) == len(expected)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.cuda
@needs_gpu
def test_a_gpu_holds_buckets_alone_and_copies_both_ways_at_once(cuda_arena: HostArena) -> None:
    bucket_bytes, num_elements, others_bytes = 96 << 20, 1 << 28, torch.cuda.memory_allocated()
    weight = torch.randn(num_elements, device="cuda")
    weight.grad = torch.randn(num_elements, device="cuda").mul_(1e-3)
    model = weight.bfloat16()
    optimizer = ADAMW([weight])
    StreamedOptimizer(optimizer, cuda_arena, [Parameter(weight, 0, lambda: model)], bucket_bytes=bucket_bytes)
    torch.cuda.synchronize()
    before_bytes = torch.cuda.memory_allocated()
    assert before_bytes - others_bytes < 7 * num_elements, "gradient and model"
    torch.cuda.reset_peak_memory_stats()
    times_ms = []
    for _ in range(4):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        optimizer.step()
        end.record()
        torch.cuda.synchronize()
        times_ms.append(start.elapsed_time(end))
    assert torch.cuda.max_memory_allocated() - before_bytes < 6 * bucket_bytes
    host = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    device.copy_(host, non_blocking=True)
    start.record()
    device.copy_(host, non_blocking=True)
    end.record()
    torch.cuda.synchronize()
    one_way_ms = start.elapsed_time(end) * 12 * num_elements / (1 << 28)
    assert min(times_ms[1:]) < 1.7 * one_way_ms, "one after the other they take twice as long"
