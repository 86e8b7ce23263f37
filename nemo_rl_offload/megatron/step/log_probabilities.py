"""What the model says of a batch, without gradients: its log-probabilities, and a teacher's largest logits."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_rl_offload.batching.batch import Batch, num_samples
from nemo_rl_offload.batching.plan import MicrobatchSplit
from nemo_rl_offload.megatron.build.model import MegatronModel
from nemo_rl_offload.megatron.step.head import HeadFactory, OutputHead
from nemo_rl_offload.megatron.step.microbatches import Microbatch
from nemo_rl_offload.megatron.step.schedule import forward_without_gradients


def compute_logprobs(
    model: MegatronModel, batch: Batch, split: int | MicrobatchSplit, heads: HeadFactory
) -> Tensor | None:
    """Log-probabilities of every token of this rank's shard, float32 [B, S] on the CPU, aligned as in `OutputHead`.

    `split` is the number of rows in each microbatch, or how a plan cuts the shard. None on ranks before the last
    pipeline stage. They leave the device after the last microbatch: the host, which would wait, prepares the next one.
    """

    def process(head: OutputHead, microbatch: Microbatch) -> Tensor:
        return head.predict(microbatch.batch["input_ids"]).logprobs

    outputs = forward_without_gradients(model, batch, split, heads, process)
    return _rows(batch, [each.cpu() for each in outputs]) if outputs else None


def compute_topk_logits(
    model: MegatronModel, batch: Batch, split: int | MicrobatchSplit, heads: HeadFactory, k: int, num_tokens: int
) -> tuple[Tensor, Tensor] | None:
    """The largest logits of this rank's shard, over temperature, float32 [B, S, K], and their token ids, int64.

    Position t holds what predicts token t; position 0 is 0. Only the first `num_tokens` of the vocabulary count.
    None on ranks before the last pipeline stage.
    """

    def process(head: OutputHead, microbatch: Microbatch) -> tuple[Tensor, Tensor]:
        values, ids = head.topk(k, num_tokens)
        return values.cpu(), ids.cpu()

    outputs = forward_without_gradients(model, batch, split, heads, process)
    if not outputs:
        return None
    values, ids = zip(*outputs, strict=True)
    return _rows(batch, values), _rows(batch, ids)


def _rows(batch: Batch, parts: Sequence[Tensor]) -> Tensor:
    """What was computed for each microbatch, [b, s, ...], as one tensor [B, S, ...] without what was filled up."""
    width = batch["input_ids"].shape[1]
    widened = [F.pad(part, (0, 0) * (part.ndim - 2) + (0, width - part.shape[1])) for part in parts]
    return torch.cat(widened)[: num_samples(batch)]
