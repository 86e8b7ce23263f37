"""Routers that take the experts which generation chose for each token (rollout routing replay, arXiv 2510.11370).

Training and generation round differently, and a router that has two experts about equal then takes another one in
training: the token's probability jumps, and with it the ratio that the loss clips. So the choice is replayed and only
its weights are computed anew, from this router's scores of the replayed experts, through which its gradient flows.

`RoutesOfGeneration` stands in a router where Megatron-Core's `RouterReplay` would (`moe_enable_routing_replay`), of
which a router asks `get_replay_topk` alone. Rejected: Megatron's own. It has no token without a choice, of which every
sequence has one at its end, and it keeps the choices of all microbatches until the end of a step, for a recomputation
that there may not be.

A router that recomputation runs again, in the backward pass, takes the same choices again. Those runs come in the order
of the microbatches, as in all of Megatron's schedules; the first of the two is the one without gradients.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

TopK = Callable[..., tuple[Tensor, Tensor]]
"""Scores [T, E] and k to the values [T, K] of the chosen experts, and these."""


class RoutesOfGeneration:
    """The choices of one router."""

    def __init__(self) -> None:
        self.layer_number: int | None = None  # which Megatron sets, as with its own
        self._present: Tensor | None = None
        self._repeats = False
        self._to_repeat: deque[Tensor] = deque()

    def begin(self, routes_TK: Tensor, *, repeats: bool) -> None:
        """The next forward takes these; `repeats`: and what recomputation runs of it in the backward pass."""
        self._present, self._repeats = routes_TK, repeats

    def end(self) -> None:
        """The forward has ended."""
        self._present = None

    def clear(self) -> None:
        """The step has ended, or failed."""
        self._present = None
        self._to_repeat.clear()

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: TopK | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Values [T, K] and experts: those of generation, and the router's own for tokens that have none."""
        assert default_compute_topk is not None, "as Megatron calls it"
        values_TK, own_TK = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        routes_TK = self._present
        if routes_TK is None:
            if not self._to_repeat:
                return values_TK, own_TK
            routes_TK = self._to_repeat.popleft()
        elif self._repeats and not torch.is_grad_enabled():
            self._to_repeat.append(routes_TK)
        assert routes_TK.shape == own_TK.shape, f"routes {routes_TK.shape} for tokens and experts {own_TK.shape}"
        experts_TK = torch.where(routes_TK < 0, own_TK, routes_TK.long())
        return scores.gather(1, experts_TK), experts_TK


def prepare_replay(chunks: Sequence[GPTModel]) -> None:
    """Let the routers of the model's layers replay what they are given; until then they choose for themselves."""
    for chunk in chunks:
        for router in routers_of(chunk):
            router.router_replay = RoutesOfGeneration()
            router.router_replay.layer_number = router.layer_number


def routers_of(chunk: GPTModel) -> Iterator[TopKRouter]:
    """The routers of a chunk's own layers, in their order."""
    for layer in chunk.decoder.layers:
        if isinstance(mlp := getattr(layer, "mlp", None), MoELayer):
            yield mlp.router
