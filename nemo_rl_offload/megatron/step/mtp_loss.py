"""The loss of layers that predict further tokens (MTP): without logits, and over context-parallel ranks.

Megatron computes it inside of the model: `process_mtp_loss` makes logits of each layer's hidden states, has the model's
cross-entropy taken of them, and adds a scaled sum to the gradients. Which tokens count, and how much, stays Megatron's:
it is given an output layer that hands hidden states on, and a cross-entropy that takes those. In training it
also adds the loss up, and how many tokens its largest logit would have guessed, for a log of the process, which nothing
reads here and which has room for as many layers as its first model: so it is told that this is none.

Without gradients the loss has no effect, and is left out.

Context-parallel ranks each have a part of a microbatch's tokens. Megatron divides by the number that count in a rank's
own part, and then averages over ranks: a token weighs more the fewer its rank has. Here the number is that of all
ranks, and the loss is multiplied by theirs, which that average divides by. Megatron also shifts a pack's tokens
sequence by sequence, with messages for each and bounds read from the device; here the parts are put together, shifted
at once and taken apart again.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import gpt_model
from megatron.core.transformer import multi_token_prediction
from torch import Tensor

from nemo_rl_offload.megatron.step.context_parallel import gather_sequence, num_ranks, shard_for_cp
from nemo_rl_offload.megatron.step.fused_linear import linear_logprobs
from nemo_rl_offload.megatron.step.hidden_states import HiddenStates, hand_on, local_head

_of_logits: Callable[..., Tensor] = multi_token_prediction.process_mtp_loss
_roll_own: Callable[..., tuple[Tensor | None, Tensor | None]] = multi_token_prediction.roll_tensor


class _HandsOn:
    """In place of the model's output layer."""

    def __init__(self, output_layer: Any) -> None:
        self._layer = output_layer

    @property
    def weight(self) -> Tensor:
        """Which Megatron detaches with `mtp_detach_heads`."""
        return self._layer.weight  # type: ignore[no-any-return]

    def __call__(self, hidden_SBH: Tensor, weight: Tensor | None, **_: Any) -> tuple[HiddenStates, None]:
        return hand_on(self._layer, hidden_SBH, weight), None


def _process_mtp_loss(*, hidden_states: Tensor, output_layer: Any, config: Any, **how: Any) -> Tensor:
    """Megatron's `process_mtp_loss`; whoever wants logits says whether they are to be gathered.

    A model that `megatron/build` did not make has no vocabulary's size in its configuration, and keeps its logits.
    """
    if not torch.is_grad_enabled():
        return hidden_states.chunk(1 + config.mtp_num_layers)[0]
    is_own = hasattr(config, "vocab_size")
    how["is_training"] &= not is_own
    if how["runtime_gather_output"] is not None or not is_own:
        how["compute_language_model_loss"] = _times_ranks(how["compute_language_model_loss"])
        return _of_logits(hidden_states=hidden_states, output_layer=output_layer, config=config, **how)

    def cross_entropy(labels_BS: Tensor, states: HiddenStates) -> Tensor:
        head = local_head(states.weight, 1.0, config.vocab_size, None)
        hidden_NH, ids_NK = states.whole().flatten(0, 1), labels_BS.reshape(-1, 1)
        adapter = states.low_rank(hidden_NH)
        logprobs, _ = linear_logprobs(hidden_NH, states.weight, ids_NK, head, entropy=False, adapter=adapter)
        return -logprobs.view(labels_BS.shape)

    how["compute_language_model_loss"] = _times_ranks(cross_entropy)
    return _of_logits(hidden_states=hidden_states, output_layer=_HandsOn(output_layer), config=config, **how)


def _times_ranks(cross_entropy: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The same, multiplied by the number of ranks that share a sequence."""
    if num_ranks() <= 1:
        return cross_entropy
    return lambda labels_BS, output: cross_entropy(labels_BS, output) * num_ranks()


def _roll(tensor: Tensor | None, **how: Any) -> tuple[Tensor | None, Tensor | None]:
    """Megatron's `roll_tensor`: each token's value [B, S / ranks] becomes its follower's in the same sequence, and 0 at
    the end. The sum of all is that of all context-parallel ranks."""
    group, part = how.get("cp_group"), getattr(how.get("packed_seq_params"), "part", None)
    if part is None or tensor is None:
        rolled, total = _roll_own(tensor, **how)
    else:
        ends = how["packed_seq_params"].cu_seqlens_q[1:].long() - 1
        whole_SB = gather_sequence(tensor.transpose(0, 1), sums_gradients=False, part=part)
        following_SB = whole_SB.roll(-1, dims=0).index_fill(0, ends, 0)
        rolled = shard_for_cp(following_SB.transpose(0, 1), part)
        total = rolled.sum()
    if total is not None and group is not None and group.size() > 1:
        dist.all_reduce(total, group=group)
    return rolled, total


def install_mtp_loss() -> None:
    """Take the place of Megatron's own."""
    gpt_model.process_mtp_loss = _process_mtp_loss
    multi_token_prediction.roll_tensor = _roll
