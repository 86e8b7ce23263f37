"""An interrupt in the middle of the stash's work: later steps are as if it had not been, and no page is lost."""

import itertools
from typing import Any

import pytest
import torch
from test_stash import LIVE, WIDTH, num_used, rows, through

from nemo_rl_offload.paged_stash.kernels import Pool
from nemo_rl_offload.paged_stash.stash import Claim, Demand, PagedStash

PLACES = [(Pool, "stash"), (Pool, "restore"), (Pool, "release"), (Pool, "new_record"), (PagedStash, "_take_record")]


def gradient(stash: PagedStash, x: torch.Tensor) -> torch.Tensor:
    stash.begin_forward()
    y = through(stash, through(stash, x))
    y[:LIVE].sum().backward()
    assert x.grad is not None
    return x.grad[:LIVE]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("owner", "name"), PLACES, ids=lambda each: getattr(each, "__name__", each))
def test_an_interrupt_loses_no_page(owner: type, name: str, after: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    original = getattr(owner, name)
    x = rows()
    num_raised = 0
    for at in range(3):
        stash = PagedStash(torch.device("cpu"), page_size=4, factor_cuda=1.0, factor_cpu=0.0)
        stash._demands[WIDTH * 4] = Demand(balanced=24, needed=24)
        stash.resize()
        stash.is_paging = True
        pending_input = x.detach().clone().requires_grad_()
        pending = through(stash, pending_input)
        through(stash, x.detach().clone().requires_grad_())  # dropped
        calls = itertools.count()

        def raising(*args: Any, at: int = at, calls: Any = calls, **kwargs: Any) -> Any:
            is_here = next(calls) == at
            if is_here and not after:
                raise KeyboardInterrupt
            result = original(*args, **kwargs)
            if is_here:
                raise KeyboardInterrupt
            return result

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, raising)
            for _ in range(2):
                try:
                    gradient(stash, x.detach().clone().requires_grad_())
                except KeyboardInterrupt:
                    num_raised += 1
        pending[:LIVE].sum().backward()
        assert pending_input.grad is not None
        assert torch.equal(pending_input.grad[:LIVE], 2 * x.detach()[:LIVE])
        expected = (4 * x.detach() ** 3)[:LIVE]
        for _ in range(3):
            assert torch.allclose(gradient(stash, x.detach().clone().requires_grad_()), expected)
        stash.end_step()
        assert num_used(stash) == 0
        assert not stash._claims
    assert num_raised > 0


def test_nothing_in_python_runs_when_a_slot_dies() -> None:
    stash = PagedStash(torch.device("cpu"), page_size=4, factor_cuda=1.0, factor_cpu=0.0)
    y = through(stash, rows())
    assert {type(claim.__callback__).__name__ for claim in stash._claims.values()} == {"builtin_function_or_method"}
    assert all(type(claim) is Claim for claim in stash._claims.values())
    del y
    stash.end_step()
    assert not stash._claims
