"""Experts behind buffers of a size known beforehand: nothing from router to combine is read by the host.

Megatron's dispatchers ask the device how many tokens came before they allocate. With `moe_expert_rank_capacity_factor`
the buffer has a fixed number of rows instead; the tokens, sorted by expert, fill its beginning, and offsets on the
device tell `grouped_mm` where each expert's end. What lies behind them, the tail, holds anything, also NaN: rows never
mix in linear and activation, and where rows meet tokens, in the combine and in the dispatch's backward, the tail counts
as zero.

Between ranks the tokens travel by an all-gather and a reduce-scatter, whose sizes do not depend on the routing; an
all-to-all would have to be padded to the worst case of each pair of ranks. Outside of training, and in a step that runs
again (`paged_stash/rerun.py`), the buffer has exactly the rows that come.
"""

from typing import Any, NamedTuple

import torch
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher
from torch import Tensor

from nemo_rl_offload.megatron.layers.whole_linear import whole_linears
from nemo_rl_offload.paged_stash.rerun import Capacity
from nemo_rl_offload.paged_stash.stash import PagedStash


class GroupEnds(NamedTuple):
    """Where each local expert's rows end, in the place of Megatron's tokens per expert."""

    ends: Tensor
    """int32 [local experts], on the device."""
    num_live: Tensor
    """int64 [1]: rows before the tail."""
    balanced_rows: int

    def tolist(self) -> "GroupEnds":
        """Megatron's experts want a list for their linears; ours take this."""
        return self


class _Gather(torch.autograd.Function):
    """values[index], [values, ...] to [rows, ...]; in backward, rows where `is_live` is false count as zero, whatever
    their gradient."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, index: Tensor, is_live: Tensor) -> Tensor:
        ctx.save_for_backward(index, is_live)
        ctx.num_values = values.shape[0]
        return values.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        index, is_live = ctx.saved_tensors
        return _add_live(grad, index, is_live, ctx.num_values), None, None


class _ScatterAdd(torch.autograd.Function):
    """Sums of the live rows by `index`, [num_values, ...]; the tail counts as zero, and gets zero."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, is_live: Tensor, num_values: int) -> Tensor:
        ctx.save_for_backward(index, is_live)
        return _add_live(rows, index, is_live, num_values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        index, is_live = ctx.saved_tensors
        return _zero_tail(grad.index_select(0, index), is_live), None, None, None


def _zero_tail(rows: Tensor, is_live: Tensor) -> Tensor:
    """`rows` [rows, ...], `is_live` bool [rows]."""
    return torch.where(is_live.view(-1, *[1] * (rows.ndim - 1)), rows, rows.new_zeros(()))


def _add_live(rows: Tensor, index: Tensor, is_live: Tensor, num_values: int) -> Tensor:
    """Sums [num_values, ...] of `rows` [rows, ...] by `index` int64 [rows] where `is_live` bool [rows]."""
    return rows.new_zeros(num_values, *rows.shape[1:]).index_add_(0, index, _zero_tail(rows, is_live))


class StaticTokenDispatcher(MoEAllGatherTokenDispatcher):  # type: ignore[misc]
    """Megatron's all-gather dispatcher, with a buffer of fixed size for this rank's experts."""

    capacity: Capacity
    routing_map: Tensor | None
    is_training = True

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, GroupEnds, Tensor]:
        """This rank's rows [capacity, hidden], their ends, and their probabilities [capacity].

        Both inputs are those of all ranks: [tokens, hidden] and [tokens, experts].
        """
        assert self.routing_map is not None
        num_tokens, mine = (
            hidden_states.shape[0],
            slice(self.local_expert_indices[0], self.local_expert_indices[-1] + 1),
        )
        chosen_ET = self.routing_map[:, mine].T.contiguous()
        position = chosen_ET.flatten().cumsum(0)
        num_live = position[-1:]
        ends = position.view(self.num_local_experts, num_tokens)[:, -1]
        balanced_rows = num_tokens * self.router_topk // self.ep_size
        num_rows = self.capacity.rows(num_live, balanced_rows, is_training=self.is_training)

        number = torch.arange(num_rows, device=hidden_states.device)
        self._is_live = number < num_live
        # Rows of the tail take different tokens, so that their zeros are not all added to one.
        spread = number % position.shape[0]
        index = torch.where(self._is_live, torch.searchsorted(position, number + 1), spread)
        self._token, self._num_tokens = index % num_tokens, num_tokens
        rows = _Gather.apply(hidden_states, self._token, self._is_live)  # type: ignore[no-untyped-call]
        self.local_probs = _Gather.apply(  # type: ignore[no-untyped-call]
            probs[:, mine].T.reshape(-1), index, self._is_live
        )
        self.routing_map = None
        group_ends = GroupEnds(ends.clamp(max=num_rows).to(torch.int32), num_live.clamp(max=num_rows), balanced_rows)
        return rows, group_ends, self.local_probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Sums of the experts' outputs for each token, [tokens, hidden], from [capacity, hidden]."""
        token, is_live = self._token, self._is_live
        del self._token, self._is_live
        output: Tensor = _ScatterAdd.apply(  # type: ignore[no-untyped-call]
            hidden_states, token, is_live, self._num_tokens
        )
        return output


class TorchMoELayer(MoELayer):  # type: ignore[misc]
    """Megatron's MoE layer; with `moe_expert_rank_capacity_factor`, without reads on the host."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        with whole_linears():
            super().__init__(*args, **kwargs)
        if self.config.moe_expert_rank_capacity_factor is not None:
            self.token_dispatcher = StaticTokenDispatcher(
                self.num_local_experts,
                self.local_expert_indices,
                config=self.config,
                pg_collection=kwargs["pg_collection"],
            )

    def forward(self, *args: object, **kwargs: object) -> tuple[Tensor, Tensor | None]:
        self.token_dispatcher.is_training = self.training
        return super().forward(*args, **kwargs)  # type: ignore[no-any-return]


class TorchGroupedMLP(TEGroupedMLP):  # type: ignore[misc]
    """Megatron's grouped experts, [rows, hidden] and probabilities [rows] to [rows, hidden]; what they save for
    backward goes to the stash, where there is one."""

    stash: PagedStash | None = None

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor | GroupEnds, permuted_probs: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        x = permuted_local_hidden_states
        if self.stash is None or not (self.training and torch.is_grad_enabled()):
            return super().forward(x, tokens_per_expert, permuted_probs)  # type: ignore[no-any-return]
        assert isinstance(tokens_per_expert, GroupEnds), "the stash comes with a static dispatcher"
        with self.stash.region(tokens_per_expert.num_live, x.shape[0], tokens_per_expert.balanced_rows) as region:
            region.exclude(self.parameters())
            output = super().forward(x, tokens_per_expert, permuted_probs)
        region.commit(x)
        return output  # type: ignore[no-any-return]
