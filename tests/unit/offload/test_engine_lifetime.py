"""What is offloaded, what is not, when memory goes, and what a user reads when something is wrong."""

import gc
import weakref
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, UntypedStorage, nn

from nemo_rl_offload.offload import HostBackend, OffloadEngine
from nemo_rl_offload.offload.backends.base import Block, Event

Make = Callable[..., OffloadEngine]


class LateBackend(HostBackend):
    """Copies whose events complete only when `finish` is called or the compute stream waits for them."""

    def __init__(self) -> None:
        self.num_events = 0
        self.completed: set[Event] = set()
        self.waits: list[Event] = []

    def copy_out(self, moves: Sequence[tuple[UntypedStorage, Block]]) -> Event:
        super().copy_out(moves)
        return self._event("out")

    def copy_in(self, blocks: Sequence[Block], started: list[UntypedStorage | Tensor]) -> tuple[list[Tensor], Event]:
        destinations, _ = super().copy_in(blocks, started)
        return destinations, self._event("in")

    def compute_wait(self, event: Event) -> None:
        self.waits.append(event)
        self.completed.add(event)

    def done(self, event: Event) -> bool:
        return event in self.completed

    def mark(self) -> Event | None:
        return "mark"

    def finish(self, *events: Event) -> None:
        self.completed.update(events)

    def _event(self, kind: str) -> Event:
        self.num_events += 1
        return f"{kind}{self.num_events}"


def late_engine(**changes: int) -> tuple[OffloadEngine, LateBackend]:
    backend = LateBackend()
    settings = {"host_memory_budget_bytes": 1 << 20, "min_tensor_bytes": 0, **changes}
    return OffloadEngine(backend, **settings), backend


def exp_chain(engine: OffloadEngine, x: Tensor, num_layers: int = 3) -> Tensor:
    """Saves the output of each exp: one storage a layer, held by nobody else."""
    for layer in range(num_layers):
        with engine.region("exp", layer) as region:
            x = (x * 0.5).exp()
        x = engine.commit(region, x)
    return x


def sentinel_in(node: torch.autograd.graph.Node) -> weakref.ref[object]:
    """A reference that dies with `node`, which itself takes none."""
    sentinel = HostBackend()
    node.metadata["sentinel"] = sentinel
    return weakref.ref(sentinel)


@pytest.fixture
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("backward", [True, False])
def test_a_dropped_graph_frees_blocks_and_tensors_without_the_collector(make_engine: Make, backward: bool) -> None:
    engine = make_engine()
    y = exp_chain(engine, torch.randn(64, requires_grad=True)).sum()
    node = sentinel_in(y.grad_fn.next_functions[0][0])
    assert engine.stats().host_bytes > 0
    if backward:
        y.backward()
        assert engine.stats().host_bytes == 0  # although the loss is still there
    del y
    assert engine.stats().host_bytes == 0
    assert node() is None
    assert engine._slots == {}
    assert engine._copies.unused_bytes == 0


@pytest.mark.usefixtures("no_collector")
def test_an_output_that_stays_on_the_device_closes_no_cycle(make_engine: Make) -> None:
    engine = make_engine()

    class SaveExcludedOutput(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            y = x.exp()
            engine.exclude([y])
            ctx.save_for_backward(y)
            return y

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.saved_tensors[0]

    with engine.region("m", 0) as region:
        y = SaveExcludedOutput.apply(torch.randn(8, requires_grad=True))
    engine.commit(region, y)
    assert engine.stats().bytes_out == 0
    node, storage = sentinel_in(y.grad_fn), weakref.ref(y.untyped_storage())
    del y
    assert node() is None
    assert storage() is None


@pytest.mark.usefixtures("no_collector")
def test_device_memory_goes_at_commit_and_with_each_node_in_backward(make_engine: Make) -> None:
    """Sources die with their copy, and a reloaded tensor with the node that used it."""
    engine = make_engine(max_prefetch_bytes=0)
    x = torch.randn(64, requires_grad=True)
    sources, at_node = [], []
    h = x
    for layer in range(3):
        with engine.region("exp", layer) as region:
            h = (h * 0.5).exp()
        sources.append(weakref.ref(h.untyped_storage()))
        h = engine.commit(region, h)
        h.register_hook(lambda grad: at_node.append(sum(slot() is not None for slot in engine._slots.values())))
    y = h.sum()
    del h
    assert [source() is None for source in sources] == [True, True, True]
    y.backward()
    assert at_node == [3, 2, 1]
    assert engine.stats().ineffective_bytes == 0
    assert engine.stats().demand_reloads == 0


def test_an_exception_in_a_region_leaves_nothing(make_engine: Make) -> None:
    engine = make_engine()

    def broken() -> None:
        y = exp_chain(engine, torch.randn(64, requires_grad=True))
        with engine.region("exp", 9):
            y = y.exp()
            raise KeyError("broken")

    with pytest.raises(KeyError, match="broken"):
        broken()
    gc.collect()
    assert engine.stats().host_bytes == 0
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda none: none):
        torch.randn(3, requires_grad=True).exp()
    assert len(kept) == 1  # the region's hooks are off


def test_a_tensor_changed_before_its_copy_names_the_module(make_engine: Make) -> None:
    engine = make_engine()
    x = torch.randn(8, requires_grad=True)
    with engine.region("core_attn", 3) as region:
        y = x.exp()
        z = y * 2
        y.detach().add_(1)
    z = engine.commit(region, z)
    with pytest.raises(RuntimeError, match="saved by core_attn of layer 3 was changed in place"):
        z.sum().backward()


def test_a_tensor_kept_on_the_device_and_changed_is_an_error_too(make_engine: Make) -> None:
    engine = make_engine(min_tensor_bytes=1 << 20)
    y = (x := torch.randn(8, requires_grad=True)) * 1
    with engine.region("m", 0) as region:
        z = y.square()
    z = engine.commit(region, z)
    y.detach().add_(1)
    with pytest.raises(RuntimeError, match="changed in place"):
        z.sum().backward()
    weight = nn.Parameter(torch.randn(8))
    with engine.region("m", 1) as region:
        z = x * weight
    weight.data = torch.zeros(8)  # another storage, as buffers of gradients do: autograd reads the new one
    engine.commit(region, z).sum().backward()
    assert torch.equal(x.grad, torch.zeros(8))


def test_a_tensor_changed_after_its_copy_is_an_error_as_in_plain_autograd(make_engine: Make) -> None:
    engine = make_engine()
    x, data = torch.randn(8, requires_grad=True), torch.randn(8)
    with engine.region("m", 0) as region:
        y = x * data
    y = engine.commit(region, y)
    data.add_(2)
    with pytest.raises(RuntimeError, match="saved by m of layer 0 was changed in place"):
        y.sum().backward()


def test_a_storage_written_through_an_alias_is_copied_again(make_engine: Make) -> None:
    """An alias that counts its versions alone."""
    engine = make_engine()
    x = torch.full((8,), 3.0, requires_grad=True)
    data = torch.full((8,), 5.0)
    with engine.region("m", 0) as region:
        y = x * data
    y = engine.commit(region, y)
    alias = data.data
    alias.add_(2)
    with engine.region("m", 1) as region:
        y = y * alias
    y = engine.commit(region, y)
    y.sum().backward()
    assert torch.equal(x.grad, torch.full((8,), 35.0))


def test_what_is_alive_since_another_forward_stays(make_engine: Make) -> None:
    """A buffer filled anew through `.data`, of which no version tells, while the first forward's graph is alive."""
    engine = make_engine()
    x, data = torch.full((8,), 3.0, requires_grad=True), torch.full((8,), 5.0)

    def forward(*layers: int) -> torch.Tensor:
        engine.begin_forward()
        y = x
        for layer in layers:
            with engine.region("m", layer) as region:
                y = y * data
            y = engine.commit(region, y)
        return y

    first = forward(0, 1)
    num_bytes = engine.stats().bytes_out
    data.data.fill_(2.0)
    forward(1).sum().backward()
    assert torch.equal(x.grad, torch.full((8,), 2.0))
    assert engine.stats().bytes_out == num_bytes == 32, "the buffer once"
    assert first.requires_grad


def test_strided_nested_tensors_stay(make_engine: Make) -> None:
    """Their type is `Tensor`, and they have no strides."""
    engine, weight = make_engine(), torch.full((3,), 2.0, requires_grad=True)
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)])
    with engine.region("m", 0) as region:
        y = torch.nn.functional.linear(nested, weight[None])
    y = engine.commit(region, y)
    torch.nested.to_padded_tensor(y, 0.0).sum().backward()
    assert torch.equal(weight.grad, torch.full((3,), 3.0))


def test_small_and_sparse_tensors_stay(make_engine: Make) -> None:
    x = torch.randn(8, dtype=torch.complex64, requires_grad=True)
    sparse = torch.eye(8).to_sparse()
    dense = torch.randn(8, 8, requires_grad=True)
    engine = make_engine()
    with engine.region("m", 0) as region:
        y = (x * torch.randn(8, dtype=torch.complex64).conj()).abs().sum() + torch.sparse.mm(sparse, dense).sum()
    engine.commit(region, y).backward()
    assert torch.equal(dense.grad, torch.ones(8, 8))
    for limits in ({"min_tensor_bytes": 33}, {"min_tensor_elements": 9}):
        engine = make_engine(**limits)
        exp_chain(engine, torch.randn(8, requires_grad=True)).sum().backward()
        assert engine.stats().bytes_out == 0
        exp_chain(engine, torch.randn(9, requires_grad=True), 1).sum().backward()
        assert engine.stats().bytes_out == 36


def test_what_does_not_fit_stays_and_is_counted(make_engine: Make) -> None:
    engine = make_engine(host_memory_budget_bytes=1024)
    x = torch.randn(100, requires_grad=True)
    exp_chain(engine, x, 5).sum().backward()
    plain = x.detach().clone().requires_grad_()
    y = plain
    for _ in range(5):
        y = (y * 0.5).exp()
    y.sum().backward()
    assert torch.equal(x.grad, plain.grad)
    stats = engine.stats()
    assert (stats.bytes_out, stats.denied_bytes) == (800, 1200)
    assert stats.host_capacity_bytes == stats.peak_host_bytes == 1024


def test_release_shrinks_offloaded_storages_only(make_engine: Make) -> None:
    engine = make_engine(min_tensor_bytes=64)
    x = torch.randn(32, requires_grad=True)
    big, small = x * 2, x[:4] * 2
    with engine.region("m", 0) as region:
        y = big.square().sum() + big[:2].square().sum() + small.square().sum()
    y = engine.commit(region, y, release=(big, small, x))
    assert [each.untyped_storage().nbytes() for each in (big, small, x)] == [0, 16, 128]
    y.backward()
    plain = x.detach()
    expected = 8 * plain
    expected[:4] += 8 * plain[:4]
    expected[:2] += 8 * plain[:2]
    assert torch.allclose(x.grad, expected)
    assert engine.stats().ineffective_bytes == 0


def test_sources_go_when_their_copy_has_ended_or_the_compute_stream_waits() -> None:
    engine, backend = late_engine(max_inflight_bytes=300)
    x = torch.randn(32, requires_grad=True)
    hidden = x * 2
    with engine.region("m", 0) as region:
        y = hidden.square()
    y = engine.commit(region, y, release=(hidden,))
    assert hidden.untyped_storage().nbytes() == 128  # its copy may still be reading
    backend.finish("out1")
    engine.end_step()
    assert hidden.untyped_storage().nbytes() == 0
    y = exp_chain(engine, y, 3)
    assert backend.waits == ["out2"]  # three copies of 128 bytes: the oldest is one too many
    y.sum().backward()
    assert {"in5", "in6"} <= set(backend.waits)  # of the region "m", and of the first exp
    assert engine.stats().returned_bytes == 2 * 128  # the sources of the last two copies were still there
    assert engine.stats().host_bytes == 0


def test_a_cap_on_commits_counts_one_whose_last_tensor_finds_no_room() -> None:
    engine, backend = late_engine(max_inflight_groups=1, host_memory_budget_bytes=3 * 512)
    x = torch.randn(32, requires_grad=True)
    for layer in range(2):
        with engine.region("m", layer) as region:
            x = x.exp() * x.tanh()
        x = engine.commit(region, x)
    assert engine.stats().denied_bytes == 128
    assert backend.waits == ["out1"]


@pytest.mark.usefixtures("no_collector")
def test_a_prefetch_nobody_used_is_freed_behind_its_copy() -> None:
    engine, backend = late_engine()
    x = torch.randn(32, requires_grad=True)
    y = exp_chain(engine, x, 3)
    backend.finish("out1", "out2", "out3")
    engine._backward_reached(deref_last(engine), None)  # the source of the last copy is still there
    assert engine._copies.unused_bytes == 2 * 128
    del y
    engine.end_step()
    assert {"in4", "in5"} <= set(backend.waits)
    assert engine._copies.unused_bytes == 0
    assert engine.stats().host_bytes == 0


def deref_last(engine: OffloadEngine):
    assert engine._order._current is not None
    return engine._order._current.groups[-1]()


@pytest.mark.parametrize(("prefetch_bytes", "ahead"), [(0, 0), (128 + 64, 1), (1 << 20, 3)])
def test_prefetch_runs_ahead_as_far_as_its_cap(prefetch_bytes: int, ahead: int) -> None:
    engine, backend = late_engine(max_prefetch_bytes=prefetch_bytes)
    y = exp_chain(engine, torch.randn(32, requires_grad=True), 4)
    backend.finish("out1", "out2", "out3", "out4")
    engine._copies.let_go()
    engine._backward_reached(deref_last(engine), None)
    assert engine.stats().bytes_in == 128 * (1 + ahead)
    y.sum().backward()
    assert engine.stats().bytes_in == 512
    assert engine.stats().demand_reloads == 0


def test_a_tensor_wanted_before_its_commit_node_is_a_demand_reload(make_engine: Make) -> None:
    engine = make_engine()
    x = torch.randn(32, requires_grad=True)
    with engine.region("m", 0) as region:
        y = (x * 2).square()
        side = (x * 3).square()
    y = engine.commit(region, y)
    side.sum().backward()
    assert engine.stats().demand_reloads == 1
    assert torch.allclose(x.grad, 18 * x)
    assert y.requires_grad


def test_closing(make_engine: Make) -> None:
    engine = make_engine()
    y = exp_chain(engine, torch.randn(32, requires_grad=True)).sum()
    engine.close()
    engine.close()
    assert engine.stats().host_capacity_bytes == 0
    assert engine.stats().bytes_out == 3 * 128
    with pytest.raises(AssertionError, match="closed"):
        y.backward()
    for use in (lambda: engine.region("m", 0), lambda: engine.exclude([]), engine.end_step):
        with pytest.raises(AssertionError, match="closed"):
            use()


def test_engines_are_independent(make_engine: Make) -> None:
    one, other = make_engine(), make_engine()
    exp_chain(other, exp_chain(one, torch.randn(32, requires_grad=True), 2), 1).sum().backward()
    assert (one.stats().bytes_out, other.stats().bytes_out) == (256, 128)
