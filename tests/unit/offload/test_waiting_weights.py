"""Weights in host memory change places with those of a model, bit for bit, however a pass ends."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from simulated_backend import SimulatedBackend
from torch import Tensor

from nemo_rl_offload.offload import waiting_weights
from nemo_rl_offload.offload.arena import HostArena
from nemo_rl_offload.offload.backends.base import Backend, HostSlab
from nemo_rl_offload.offload.backends.cuda import CudaBackend
from nemo_rl_offload.offload.backends.host import HostBackend
from nemo_rl_offload.offload.waiting_weights import AwayTensors, DepartingWeights, WaitingWeights, covered_ranges

BUDGET_BYTES = 1 << 26
on_every_device = pytest.mark.parametrize(
    "name",
    [
        "cpu",
        "races",
        pytest.param(
            "cuda",
            marks=[pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
        ),
    ],
)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_weights, "PIECE_BYTES", 1 << 12)


@contextmanager
def backend_of(name: str) -> Iterator[Backend]:
    """Of a device; "races" is one whose copies are as late as they may be, and must leave no hazard."""
    if name != "races":
        yield CudaBackend() if name == "cuda" else HostBackend()
        return
    backend = SimulatedBackend()
    yield backend
    assert backend.hazards == []


@pytest.fixture
def arena(name: str) -> Iterator[HostArena]:
    with backend_of(name) as backend:
        yield HostArena(backend, BUDGET_BYTES)


@pytest.fixture
def device(name: str) -> str:
    """Where its tensors are."""
    return "cuda" if name == "cuda" else "cpu"


def single(device: str) -> list[Tensor]:
    """Parameters with storages of their own, of several types, one without elements."""
    return [
        torch.randn(300, 17, device=device),
        torch.randn(5000, device=device).bfloat16(),
        torch.randn(0, 3, device=device),
        torch.tensor(2.5, device=device),
        torch.randint(0, 9, (1025,), device=device),
    ]


def of_a_buffer(device: str) -> list[Tensor]:
    """Views of one buffer with gaps, as data parallelism makes them; its second half belongs to somebody else."""
    buffer = torch.randn(200_000, device=device)
    return [buffer[0:7001], buffer[7040:20_040].view(130, 100), buffer[60_000:90_000]]


def tied(device: str) -> list[Tensor]:
    """An output layer that is the embedding, a view of it besides, and a parameter that is laid out by columns."""
    embedding = torch.nn.Parameter(torch.randn(500, 16, device=device))
    return [embedding, embedding, embedding.detach()[10:20], torch.randn(40, 60, device=device).t()]


MODELS = {"single": single, "of a buffer": of_a_buffer, "tied": tied}


def contents(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Of whole storages, what does not belong to the tensors included."""
    return [torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage()).clone() for t in tensors]


def are_equal(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return all(torch.equal(a.detach().contiguous(), b) for a, b in zip(found, expected, strict=True))


@on_every_device
@pytest.mark.parametrize("room_bytes", [0, 9 << 10, 1 << 30], ids=["exchanged", "some kept", "all kept"])
@pytest.mark.parametrize("model", MODELS)
def test_a_pass_sees_the_waiting_weights_and_leaves_every_bit(
    model: str, room_bytes: int, device: str, arena: HostArena
) -> None:
    torch.manual_seed(1)
    tensors = MODELS[model](device)
    start = [tensor.detach().clone() for tensor in tensors]
    waiting = WaitingWeights(arena, tensors)
    for step in range(3):
        for tensor in tensors:
            tensor.detach().mul_(3).add_(step + 1)
        addresses, before = [tensor.data_ptr() for tensor in tensors], contents(tensors)
        present = [tensor.detach().clone() for tensor in tensors]
        with waiting.in_place(room_bytes):
            assert are_equal(tensors, start)
            assert [tensor.data_ptr() for tensor in tensors] == addresses
        assert are_equal(contents(tensors), before)
        assert are_equal(tensors, present)
        assert not are_equal(present, start)


@on_every_device
@pytest.mark.parametrize("room_bytes", [0, 1 << 30])
def test_a_pass_that_fails_leaves_every_bit(room_bytes: int, device: str, arena: HostArena) -> None:
    tensors = of_a_buffer(device)
    start = [tensor.clone() for tensor in tensors]
    waiting = WaitingWeights(arena, tensors)
    tensors[0].neg_()
    before = contents(tensors)
    with pytest.raises(KeyError, match="pass"), waiting.in_place(room_bytes):
        raise KeyError("pass")
    assert are_equal(contents(tensors), before)
    with waiting.in_place():
        assert are_equal(tensors, start)


@pytest.mark.parametrize("call", ["copy_in", "copy_out"])
@pytest.mark.parametrize("room_bytes", [0, 1 << 13])
def test_an_exchange_that_fails_on_its_way_leaves_every_bit(
    call: str, room_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the device has no memory for one more scratch buffer: at each piece in turn."""
    backend = HostBackend()
    tensors = single("cpu")
    start = [tensor.clone() for tensor in tensors]
    waiting = WaitingWeights(HostArena(backend, BUDGET_BYTES), tensors)
    tensors[0].neg_()
    before = contents(tensors)
    original = getattr(backend, call)
    num_calls = len(waiting._blocks) - (room_bytes >> 12 if call == "copy_out" else 0)
    for number in range(num_calls):
        fails = iter(index == number for index in range(1000))

        def fail(*args: object, fails: Iterator[bool] = fails) -> object:
            if next(fails):
                raise torch.OutOfMemoryError
            return original(*args)

        monkeypatch.setattr(backend, call, fail)
        with pytest.raises(torch.OutOfMemoryError), waiting.in_place(room_bytes):
            raise AssertionError("the exchange did not fail")
        assert are_equal(contents(tensors), before), f"{call} {number}"
    monkeypatch.setattr(backend, call, original)
    with waiting.in_place():
        assert are_equal(tensors, start)
    assert are_equal(contents(tensors), before)
    assert num_calls > waiting_weights.MAX_UNDER_WAY


@on_every_device
@pytest.mark.parametrize("fails", [False, True])
def test_what_departs_has_no_memory_but_within(fails: bool, device: str, arena: HostArena) -> None:
    buffer = torch.randn(5000, device=device)
    tensors = [buffer[:3000], buffer[3008:5000].view(4, 498), *tied(device)[:2]]
    shared = torch.randn(100_000, device=device)
    start = [tensor.detach().clone() for tensor in (*tensors, shared[:50])]
    departing = DepartingWeights(arena, [*tensors, shared[:50]])
    for _ in range(2):
        assert [tensor.untyped_storage().nbytes() for tensor in tensors] == [0, 0, 0, 0]
        try:
            with departing.on_device():
                assert are_equal([*tensors, shared[:50]], start)
                if fails:
                    raise KeyError
        except KeyError:
            assert fails
        assert torch.equal(shared[:50], start[-1])
    assert departing.num_bytes >= sum(tensor.nbytes for tensor in start[:3])


@on_every_device
@pytest.mark.parametrize("model", MODELS)
def test_what_was_away_comes_back_with_its_last_bits(model: str, device: str, arena: HostArena) -> None:
    """Also where more of them leave the next time, as an optimizer's state after its first step."""
    tensors, away = MODELS[model](device), AwayTensors(arena)
    first_bytes = 800_000 if model == "of a buffer" else 0  # of a storage that others use too
    for step in range(4):
        if step == 2:
            tensors.append(torch.randn(30_000, device=device))
        for tensor in tensors:
            tensor.detach().mul_(3).add_(step + 1)
        before = [tensor.detach().clone() for tensor in tensors]
        away.leave(tensors)
        assert away.are_away or model == "of a buffer"
        assert tensors[0].untyped_storage().nbytes() == first_bytes
        assert step < 2 or tensors[-1].untyped_storage().nbytes() == 0
        assert arena.held_bytes == away.num_bytes
        away.come_back()
        away.come_back()
        assert not away.are_away
        assert are_equal(tensors, before)
        tensors[0].detach().neg_()
        away.come_back()
        assert torch.equal(tensors[0].detach(), -before[0]), "there is nothing to come back"
    assert away.num_bytes >= 30_000 * 4


def test_what_grows_takes_the_room_that_activations_had_and_do_not_use() -> None:
    """As an optimizer's state after its first step, whose activations came first."""
    arena = HostArena(HostBackend(), 64 << 10)
    tensors, away = [torch.randn(2 << 10)], AwayTensors(arena)
    away.leave(tensors)
    away.come_back()
    activations = arena.reserve(32 << 10)
    assert activations is not None
    more = [*tensors, torch.randn(8 << 10)]
    before = [tensor.clone() for tensor in more]
    with pytest.raises(MemoryError, match="are needed"):
        away.leave(more)
    arena.release(activations)
    away.leave(more)
    away.come_back()
    assert are_equal(more, before)
    assert arena.reserve(16 << 10) is not None, "activations get what is left"
    assert arena.capacity_bytes + arena.held_bytes <= 64 << 10


def test_what_has_no_room_on_the_host_stays() -> None:
    arena = HostArena(HostBackend(), 1 << 14)
    tensors, away = single("cpu"), AwayTensors(arena)
    before = [tensor.clone() for tensor in tensors]
    with pytest.raises(MemoryError, match="are needed, 16384 left"):
        away.leave(tensors)
    assert (away.are_away, away.num_bytes, arena.held_bytes) == (False, 0, 0)
    assert are_equal(tensors, before)


def test_what_finds_no_room_on_its_way_back_is_away_and_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = HostBackend()
    tensors, away = single("cpu"), AwayTensors(HostArena(backend, BUDGET_BYTES))
    before = [tensor.clone() for tensor in tensors]
    away.leave(tensors)
    calls = iter(range(100))

    def fail(*args: object) -> object:
        if next(calls) == 3:
            raise torch.OutOfMemoryError
        return copy_in(*args)  # type: ignore[arg-type]

    copy_in = backend.copy_in
    monkeypatch.setattr(backend, "copy_in", fail)
    with pytest.raises(torch.OutOfMemoryError):
        away.come_back()
    assert away.are_away
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors)
    away.come_back()
    assert are_equal(tensors, before)


@pytest.mark.parametrize(("room_bytes", "times"), [(0, 1.1), (1 << 30, 1.1)])
def test_both_directions_are_busy_at_once(room_bytes: int, times: float) -> None:
    """What comes takes the link's rate, and what goes no time besides."""
    backend = SimulatedBackend(out_bytes_per_ms=1 << 12, in_bytes_per_ms=1 << 12)
    weight = torch.zeros(60 << 12, dtype=torch.uint8)
    waiting = WaitingWeights(HostArena(backend, BUDGET_BYTES), [weight])
    begin = backend.now_ms
    with waiting.in_place(room_bytes):
        there = backend.now_ms
    assert there - begin <= 60 * times
    assert backend.now_ms - there <= (0 if room_bytes else 60 * times)
    assert backend.hazards == []


def test_ranges_are_those_of_the_tensors_alone() -> None:
    buffer = torch.zeros(1 << 20, dtype=torch.uint8)
    far = waiting_weights.MAX_GAP_BYTES + 1
    tensors = [buffer[100:200], buffer[200 + far : 300 + far], buffer[0:150], buffer[260 + far : 400 + far]]
    assert [(begin, end) for _, begin, end in covered_ranges(tensors)] == [(0, 200), (200 + far, 400 + far)]


def test_one_copy_in_the_arena_is_all_that_is_taken() -> None:
    arena = HostArena(HostBackend(), BUDGET_BYTES)
    waiting = WaitingWeights(arena, tied("cpu"))
    with waiting.in_place():
        assert arena.held_bytes == waiting.num_bytes
        assert arena.used_bytes == 0
    assert 0 <= waiting.num_bytes - (500 * 16 + 40 * 60) * 4 < 512 * len(waiting._blocks)


def test_slabs_are_powers_of_two_but_for_the_last() -> None:
    arena = HostArena(HostBackend(), BUDGET_BYTES)
    WaitingWeights(arena, [torch.zeros(11 << 20, dtype=torch.uint8), torch.zeros(1000, dtype=torch.uint8)])
    assert sorted(block.num_bytes for block in arena._held) == [1024, 1 << 20, 2 << 20, 8 << 20]


@pytest.mark.parametrize("refuses", [False, True], ids=["budget", "system"])
def test_what_does_not_fit_takes_nothing(refuses: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = HostBackend()
    arena = HostArena(backend, 1 << 26 if refuses else 1 << 14)
    sizes: list[int] = []
    allocate = backend.allocate_host

    def refuse(num_bytes: int) -> HostSlab:
        sizes.append(num_bytes)
        if len(sizes) > 1:
            raise MemoryError("refused")
        return allocate(num_bytes)

    monkeypatch.setattr(backend, "allocate_host", refuse)
    with pytest.raises(MemoryError, match="refused" if refuses else r"3146240 bytes are needed, 16384 left"):
        WaitingWeights(arena, [torch.zeros(3_146_000, dtype=torch.uint8)])
    assert arena.held_bytes == 0


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_device_scratch_is_bounded_and_compute_before_and_after_keeps_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(waiting_weights, "PIECE_BYTES", 8 << 20)
    backend = CudaBackend()
    weight = torch.randn(8192, 8192, device="cuda")
    waiting = WaitingWeights(HostArena(backend, 1 << 30), [weight])
    start, x = weight.clone(), torch.randn(8192, 64, device="cuda")
    for _ in range(3):
        for _ in range(10):  # kernels that are still under way when the exchange begins
            weight.mul_(1.01).sin_()
        expected = (start @ x, weight.clone())
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with waiting.in_place():
            exchanged = torch.cuda.max_memory_allocated() - before
            seen = weight @ x
        assert torch.equal(seen, expected[0])
        assert torch.equal(weight, expected[1])
        assert exchanged <= (waiting_weights.MAX_UNDER_WAY + 1) * (8 << 20)
