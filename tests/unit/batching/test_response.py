"""Turns of an episode as one response."""

import numpy as np

from nemo_rl_offload.batching.response import Response


def routes(first: int, num_tokens: int) -> np.ndarray:
    """Of one layer, one expert."""
    return np.arange(first, first + num_tokens, dtype=np.int8).reshape(-1, 1, 1)


def test_each_turn_keeps_the_experts_that_drew_its_tokens() -> None:
    """A prompt of 2, a turn of 3, an observation of 2, a turn of 1; the last token of a turn has no experts yet."""
    nothing = Response([], [], finished=False, num_turns=0)
    first = nothing.then([], Response([5, 6, 7], [-1.0] * 3, True, routed_experts=routes(0, 4)))
    assert first.routed_experts is not None
    assert first.routed_experts[:, 0, 0].tolist() == [0, 1, 2, 3]
    second = Response([9], [-1.0], True, routed_experts=routes(50, 7))
    both = first.then([1, 1], second).routed_experts
    assert both is not None
    assert both[:, 0, 0].tolist() == [0, 1, 2, 3, 54, 55, 56]
    assert both.dtype == np.int8


def test_a_turn_without_experts_leaves_those_of_the_other() -> None:
    said, silent = Response([5], [0.0], True, routed_experts=routes(0, 2)), Response([6], [0.0], True)
    assert said.then([], silent).routed_experts is said.routed_experts
    assert silent.then([], said).routed_experts is said.routed_experts
    assert silent.then([], silent).routed_experts is None
