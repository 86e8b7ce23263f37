"""Copies that free nothing are made once, and say nothing about the others."""

from collections.abc import Callable

import torch

from nemo_rl_offload.offload import OffloadEngine

Make = Callable[..., OffloadEngine]


def test_bytes_that_something_else_keeps_alive_are_ineffective(make_engine: Make) -> None:
    engine = make_engine()
    x = torch.randn(32, requires_grad=True)
    held = x * 2
    with engine.region("m", 0) as region:
        y = held.square().exp()
    y = engine.commit(region, y).sum()
    y.backward()
    assert (engine.stats().bytes_out, engine.stats().ineffective_bytes) == (256, 128)


def test_bytes_that_the_next_module_saves_too_are_copied_once(make_engine: Make) -> None:
    """Backward frees what the next module saved before it comes to the region; that is not the region's doing."""
    engine = make_engine()

    def forward(x: torch.Tensor) -> torch.Tensor:
        with engine.region("m", 0) as region:
            y = x.exp()
        y = engine.commit(region, y).square()
        with engine.region("m", 1) as region:
            y = y.exp()
        return engine.commit(region, y * 2).sum()

    for step in range(3):
        forward(torch.randn(32, requires_grad=True)).backward()
        assert (engine.stats().bytes_out, engine.stats().ineffective_bytes) == (128 * (step + 2), 128)


def test_a_storage_of_two_forwards_does_not_rename_the_others(make_engine: Make) -> None:
    engine = make_engine()
    constant = torch.randn(32)

    def forward() -> torch.Tensor:
        x = torch.randn(32, requires_grad=True)
        with engine.region("m", 0) as region:
            y = (x * constant).exp() * 2
        return engine.commit(region, y).sum()

    forward().backward()
    assert (engine.stats().bytes_out, engine.stats().ineffective_bytes) == (2 * 128, 128)
    waiting = [forward(), forward()]  # the constant belongs to the first of them alone
    assert engine.stats().bytes_out == 4 * 128, "each result leaves, the constant stays"
    for output in waiting:
        output.backward()


def test_chunks_that_take_turns_are_all_offloaded(make_engine: Make) -> None:
    """Two forwards of each of two chunks before the first backward, then more of them, as interleaved pipelines do."""
    engine = make_engine()
    outputs = {}

    def forward(chunk: int, microbatch: int) -> None:
        engine.begin_forward()
        x = torch.randn(32, requires_grad=True)
        for number in range(3):
            with engine.region("m", f"{chunk}.{number}") as region:
                x = x.exp() * 0.1
            x = engine.commit(region, x)
        outputs[chunk, microbatch] = x.sum()

    for chunk, microbatch in ((0, 0), (0, 1), (1, 0), (1, 1)):
        forward(chunk, microbatch)
    for number, (chunk, microbatch) in enumerate(((0, 2), (0, 3), (1, 2), (1, 3))):
        outputs.pop((1 - number // 2, number % 2)).backward()
        forward(chunk, microbatch)
    for output in outputs.values():
        output.backward()
    assert engine.stats().bytes_out == 8 * 3 * 128
