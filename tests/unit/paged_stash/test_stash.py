"""What a region stashes, how it comes back, and what becomes of graphs that never see a backward."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from nemo_rl_offload.paged_stash.stash import Demand, PagedStash

CAPACITY, LIVE, WIDTH = 12, 9, 8


class Square(torch.autograd.Function):
    """x * x, saving x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * grad


@pytest.fixture
def stash() -> Iterator[PagedStash]:
    """A stash with room for eight tensors of `WIDTH` float32."""
    stash = PagedStash(torch.device("cpu"), page_size=4, factor_cuda=1.0, factor_cpu=0.0)
    stash._demands[WIDTH * 4] = Demand(balanced=24, needed=24)
    stash.resize()
    stash.is_paging = True
    yield stash
    stash.end_step()
    assert num_used(stash) == 0


def num_used(stash: PagedStash) -> int:
    counters = [(pool, pool.counters()) for pool in stash.pools.values()]
    return sum(pool.num_device - each["tail_device"] + each["head_device"] for pool, each in counters)


def rows() -> Tensor:
    return torch.randn(CAPACITY, WIDTH).requires_grad_()


def through(stash: PagedStash, x: Tensor, exclude: tuple[Tensor, ...] = ()) -> Tensor:
    with stash.region(torch.tensor([LIVE]), CAPACITY, LIVE) as region:
        region.exclude(exclude)
        y: Tensor = Square.apply(x)  # type: ignore[no-untyped-call]
    region.commit(x)
    return y


def test_live_rows_come_back_for_backward(stash: PagedStash) -> None:
    x = rows()
    y = through(stash, x * 1.0)
    assert num_used(stash) == 3
    stash._settle()
    y[:LIVE].sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad[:LIVE], 2 * x.detach()[:LIVE])
    assert num_used(stash) == 0


def test_sources_are_let_go_of_when_the_next_region_begins(stash: PagedStash) -> None:
    first = through(stash, rows() * 1.0)
    assert [slot.storage is None for slot in stash._sources] == [False]
    (slot,) = stash._sources
    second = through(stash, first)
    assert slot.storage is None
    second[:LIVE].sum().backward()


def test_views_share_a_slot_and_keep_their_strides(stash: PagedStash) -> None:
    base = rows()
    whole = base * 1.0
    with stash.region(torch.tensor([LIVE]), CAPACITY, LIVE) as region:
        left, right = whole.chunk(2, dim=1)
        y = Square.apply(left) + Square.apply(right)  # type: ignore[no-untyped-call]
    region.commit(whole)
    assert num_used(stash) == 3, "one storage"
    del whole, left, right
    stash._settle()
    y[:LIVE].sum().backward()
    assert base.grad is not None
    assert torch.equal(base.grad[:LIVE], 2 * base.detach()[:LIVE])


def test_what_stays(stash: PagedStash) -> None:
    weight = torch.nn.Parameter(torch.randn(CAPACITY, WIDTH))
    y = through(stash, weight, exclude=(weight,))
    assert num_used(stash) == 0, "a parameter whose shape is the capacity's"
    z = through(stash, torch.randn(CAPACITY, 3, requires_grad=True) * 1.0)
    assert num_used(stash) == 0, "12 bytes a row"
    other = through(stash, torch.randn(CAPACITY - 1, WIDTH, requires_grad=True) * 1.0)
    assert num_used(stash) == 0, "another number of rows"
    (y.sum() + z.sum() + other.sum()).backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, 2 * weight.detach())


def test_a_mark_takes_in_another_shape(stash: PagedStash) -> None:
    base = rows()
    flat = (base * 1.0).view(-1)
    with stash.region(torch.tensor([LIVE]), CAPACITY, LIVE) as region:
        region.mark(flat)
        y: Tensor = Square.apply(flat)  # type: ignore[no-untyped-call]
    region.commit(flat)
    assert num_used(stash) == 3
    stash._settle()
    y[: LIVE * WIDTH].sum().backward()
    assert base.grad is not None
    assert torch.equal(base.grad[:LIVE], 2 * base.detach()[:LIVE])


def test_without_grad_nothing_is_stashed(stash: PagedStash) -> None:
    with torch.no_grad():
        through(stash, rows())
    assert num_used(stash) == 0


def test_a_dropped_graph_returns_its_pages(stash: PagedStash) -> None:
    y = through(stash, rows() * 1.0)
    stash._settle()
    gc.disable()
    try:
        del y
        assert num_used(stash) == 3
        stash.end_step()
        assert num_used(stash) == 0
    finally:
        gc.enable()


def test_the_group_before_comes_back_ahead_of_its_backward(stash: PagedStash) -> None:
    stash.begin_forward()
    x = rows()
    hidden = through(stash, x * 1.0)
    y = through(stash, hidden + 0.0)
    groups = [stash._last() if stash._last is not None else None]
    (second,) = groups
    assert second is not None
    assert second.previous is not None
    first = second.previous()
    assert first is not None
    assert [slot.record is None for reference in first.slots if (slot := reference())] == [False]
    seen = []
    hidden.register_hook(lambda _: seen.append(first.is_loading))
    y[:LIVE].sum().backward()
    assert seen == [True]


def test_a_new_forward_has_no_group_before(stash: PagedStash) -> None:
    y = through(stash, rows() * 1.0)
    stash.begin_forward()
    z = through(stash, rows() * 1.0)
    group = stash._last() if stash._last is not None else None
    assert group is not None
    assert group.previous is None
    (y + z)[:LIVE].sum().backward()


def test_a_full_stash_says_so(stash: PagedStash) -> None:
    kept = [through(stash, rows() * 1.0) for _ in range(9)]
    assert stash.flags().tolist() == [True, False]
    stash.clear_flags()
    assert stash.flags().tolist() == [False, False]
    del kept


def test_without_pages_demand_is_counted() -> None:
    stash = PagedStash(torch.device("cpu"), page_size=4, factor_cuda=1.5, factor_cpu=-0.5)
    x = torch.randn(LIVE, WIDTH, requires_grad=True)
    for _ in range(2):
        regions = []
        for _ in range(2):
            with stash.region(torch.tensor([LIVE]), LIVE, 6) as region:
                regions.append(Square.apply(x * 1.0))  # type: ignore[no-untyped-call]
            region.commit(x)
        for y in regions:
            y.sum().backward()
        del y, regions
    assert stash.needed_factor() == 6 / 4
    stash.resize()
    (pool,) = stash.pools.values()
    assert (pool.num_device, pool.num_host) == (6, 3)
    assert stash.sizes() == {"device_bytes": 6 * 128, "host_bytes": 3 * 128, "peak_bytes": 0}
