"""What one router is told to replay, forwards and again in backward."""

from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

from nemo_rl_offload.megatron.layers.router_replay import RoutesOfGeneration

NUM_TOKENS, NUM_EXPERTS, TOPK = 5, 6, 2
Routed = tuple[torch.Tensor, torch.Tensor]


def routed(logits: torch.Tensor, replay: Any, **how: Any) -> Routed:
    """Megatron's probabilities [T, E] and its map."""
    return topk_routing_with_score_function(logits, TOPK, router_replay=replay, **how)  # type: ignore[no-any-return]


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(NUM_TOKENS, NUM_EXPERTS, generator=torch.Generator().manual_seed(0), requires_grad=True)


HOW: list[dict[str, Any]] = [
    {},
    {"use_pre_softmax": True},
    {"score_function": "sigmoid", "expert_bias": torch.linspace(-1, 1, NUM_EXPERTS), "scaling_factor": 2.5},
    {"score_function": "sigmoid", "num_groups": 3, "group_topk": 1},
]


@pytest.mark.parametrize("how", HOW)
def test_given_experts_are_weighed_by_the_routers_own_scores(logits: torch.Tensor, how: dict[str, Any]) -> None:
    """As if every other expert were out of reach; the third token has no route and takes its own."""
    replay = RoutesOfGeneration()
    routes = torch.tensor([[0, 5], [3, 1], [-1, -1], [2, 4], [5, 0]], dtype=torch.int8)
    replay.begin(routes, repeats=False)
    probs, chosen = routed(logits, replay, **how)
    own_probs, own_chosen = routed(logits, None, **how)
    assert torch.equal(probs[2], own_probs[2])
    assert torch.equal(chosen[2], own_chosen[2])
    assert chosen.sum(1).tolist() == [TOPK] * NUM_TOKENS
    for token, route in enumerate(routes.tolist()):
        if route[0] >= 0:
            assert chosen[token].nonzero()[:, 0].tolist() == sorted(route)
            scores = logits[token].sigmoid() if how.get("score_function") else logits[token].softmax(0)
            kept = scores[route]
            kept = kept if how.get("use_pre_softmax") else kept / kept.sum()
            torch.testing.assert_close(probs[token, route], kept * how.get("scaling_factor", 1))
    (probs * torch.arange(NUM_EXPERTS)).sum().backward()
    assert logits.grad is not None
    assert (logits.grad[0, [0, 5]] != 0).all(), "through the scores of the replayed experts"


def test_its_own_experts_are_those_without_replay(logits: torch.Tensor) -> None:
    plain, (own_probs, own_chosen) = RoutesOfGeneration(), routed(logits, None)
    assert torch.equal(routed(logits, plain)[0], own_probs), "nothing to replay"
    plain.begin(own_chosen.nonzero()[:, 1].view(-1, TOPK), repeats=True)
    assert torch.equal(routed(logits, plain)[0], own_probs)
    plain.begin(torch.zeros(NUM_TOKENS, TOPK), repeats=True)
    plain.end()
    assert torch.equal(routed(logits, plain)[0], own_probs), "after the forward"


def test_recomputation_repeats_each_forward_once_in_their_order(logits: torch.Tensor) -> None:
    replay = RoutesOfGeneration()
    first, second = torch.tensor([[0, 1]] * NUM_TOKENS), torch.tensor([[2, 3]] * NUM_TOKENS)
    maps = []
    for routes in (first, second):
        replay.begin(routes, repeats=True)
        with torch.no_grad():
            maps.append(routed(logits, replay)[1])
        replay.end()
    again = [routed(logits, replay)[1] for _ in range(3)]
    assert torch.equal(again[0], maps[0])
    assert torch.equal(again[1], maps[1])
    assert torch.equal(again[2], routed(logits, None)[1]), "nothing is left"
    for repeats in (True, False):
        replay.begin(first, repeats=repeats)
        with torch.set_grad_enabled(repeats):
            routed(logits, replay)  # with gradients, or in an evaluation, nothing will be repeated
        replay.end()
        assert torch.equal(routed(logits, replay)[1], routed(logits, None)[1])
    replay.begin(first, repeats=True)
    with torch.no_grad():
        routed(logits, replay)
    replay.clear()
    assert torch.equal(routed(logits, replay)[1], routed(logits, None)[1]), "of a step that failed"


def test_routes_of_other_tokens_are_an_error(logits: torch.Tensor) -> None:
    replay = RoutesOfGeneration()
    replay.begin(torch.zeros(NUM_TOKENS + 1, TOPK), repeats=False)
    with pytest.raises(AssertionError, match="routes"):
        routed(logits, replay)
