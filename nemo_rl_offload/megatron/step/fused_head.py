"""The output head that makes no logits: from the hidden states behind the last layer, and the output weight.

Megatron's `GPTModel` hands both to an `output_processor` in place of its own output layer. What leaves the model is an
object of them, which its wrapper for 16 bits passes on as it is. `fused_linear` computes; here is who holds which
tokens: hidden states are split over tensor-parallel ranks with sequence parallelism, and over context-parallel ranks,
and a pack's are in one row.

Layers that predict further tokens (MTP) have a loss of their own, which Megatron computes from logits inside of the
model; `mtp_loss` puts the same computation there.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nemo_rl_offload.megatron.step.context_parallel import gather_for_cp, shift_logits, shift_targets
from nemo_rl_offload.megatron.step.fused_linear import Head, linear_logprobs, linear_topk
from nemo_rl_offload.megatron.step.head import Prediction, merge_topk
from nemo_rl_offload.megatron.step.hidden_states import HiddenStates, hand_on, local_head
from nemo_rl_offload.megatron.step.microbatches import Microbatch
from nemo_rl_offload.megatron.step.mtp_loss import install_mtp_loss


def _hand_on(*, hidden_states: Tensor, output_layer: Any, output_weight: Tensor | None, **_: Any) -> HiddenStates:
    return hand_on(output_layer, hidden_states, output_weight)


@dataclass(frozen=True)
class FusedHeadFactory:
    """Heads from hidden states and the output weight."""

    temperature: float
    vocab_size: int
    """Without the rows that pad it."""
    chunk_tokens: int | None = None
    """Tokens of a microbatch that are computed at a time; None: as many as is best."""
    chunk_positions: int | None = None
    """The same as positions of each of its rows, where `chunk_tokens` is None."""

    def __post_init__(self) -> None:
        install_mtp_loss()

    @property
    def forward_kwargs(self) -> Mapping[str, object]:
        """See `HeadFactory`."""
        return {"output_processor": _hand_on}

    def build(self, output: HiddenStates, microbatch: Microbatch) -> "FusedHead":
        """See `HeadFactory`."""
        chunk_tokens = self.chunk_tokens
        if chunk_tokens is None and self.chunk_positions is not None:
            chunk_tokens = self.chunk_positions * len(microbatch.input_ids)
        return FusedHead(output, microbatch, local_head(output.weight, self.temperature, self.vocab_size, chunk_tokens))


class FusedHead:
    """An `OutputHead` of one microbatch."""

    def __init__(self, output: HiddenStates, microbatch: Microbatch, head: Head) -> None:
        self._output, self._microbatch, self._head = output, microbatch, head

    def predict(self, ids_BS: Tensor, further_ids_BSK: Tensor | None = None, *, entropy: bool = False) -> Prediction:
        """See `OutputHead`."""
        ids_BSK = ids_BS[..., None]
        if further_ids_BSK is not None:
            ids_BSK = torch.cat([ids_BSK, further_ids_BSK], dim=-1)
        targets_BSK = shift_targets(self._microbatch.for_model(ids_BSK), self._microbatch.part)
        hidden_NH = shift_logits(self._output.whole()).flatten(0, 1)
        logprobs, entropies = linear_logprobs(
            hidden_NH,
            self._output.weight,
            targets_BSK.flatten(0, 1),
            self._head,
            entropy=entropy,
            adapter=self._output.low_rank(hidden_NH),
        )
        chosen_BSK = self._for_loss(logprobs.view(targets_BSK.shape))
        return Prediction(
            chosen_BSK[..., 0],
            None if further_ids_BSK is None else chosen_BSK[..., 1:],
            None if entropies is None else self._for_loss(entropies.view(targets_BSK.shape[:2])),
        )

    def topk(self, k: int, num_tokens: int) -> tuple[Tensor, Tensor]:
        """See `OutputHead`."""
        head = replace(self._head, num_local=min(max(num_tokens - self._head.first, 0), self._head.num_local))
        hidden_BSH = shift_logits(self._output.whole())
        hidden_NH = hidden_BSH.flatten(0, 1)
        own = linear_topk(hidden_NH, self._output.weight, k, head, self._output.low_rank(hidden_NH))
        merged = merge_topk(*own, k)
        values, ids = (self._for_loss(each.view(*hidden_BSH.shape[:2], each.shape[-1])) for each in merged)
        return values, ids

    def _for_loss(self, values_BS: Tensor) -> Tensor:
        """Values of shifted tokens, [B, S, ...], as the microbatch's rows."""
        return self._microbatch.for_loss(gather_for_cp(values_BS, self._microbatch.part))
