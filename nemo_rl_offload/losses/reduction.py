"""Masked sums over a microbatch, divided by counts of the whole global batch.

A loss is a sum over the tokens of a microbatch divided by a count that belongs to the global batch. Losses
and metrics of all microbatches and ranks therefore add up to the same value however the batch is cut. The
alternative, a mean per microbatch averaged over microbatches, weighs a token by the length of its neighbors
and was rejected.

Tensors follow one alignment: ``x[:, t]`` belongs to ``input_ids[:, t]``. Nothing predicts the first token, so
its column never counts, whatever the mask says there.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor


class Normalizers(NamedTuple):
    """Counts over the global batch: 0-dim float32, at least 1, so that an empty batch gives zero."""

    global_valid_tokens: Tensor
    global_valid_seqs: Tensor


def normalizers(batch: Mapping[str, Tensor]) -> Normalizers:
    """Count the tokens and sequences of a global batch that a loss averages over.

    Args:
        batch: ``token_mask`` [B,S] and ``sample_mask`` [B], 0 or 1, any dtype; the whole global batch, before
            it is cut into shards.
    """
    return Normalizers(valid_tokens(batch).sum().float().clamp(min=1), batch["sample_mask"].sum().float().clamp(min=1))


def valid_tokens(batch: Mapping[str, Tensor]) -> Tensor:
    """Return the bool mask [B,S] of tokens that count: in ``token_mask``, in a valid sample, not first."""
    mask = batch["token_mask"].bool() & batch["sample_mask"].bool()[:, None]
    return mask & (torch.arange(mask.shape[1], device=mask.device) > 0)


def token_mean(values_BS: Tensor, mask_BS: Tensor, norm: Normalizers) -> Tensor:
    """Return this microbatch's share of the mean over valid tokens; ``mask_BS`` is bool."""
    return values_BS.masked_fill(~mask_BS, 0).sum() / norm.global_valid_tokens


def sequence_mean(values_BS: Tensor, mask_BS: Tensor, norm: Normalizers) -> Tensor:
    """Return this microbatch's share of the mean over sequences of their token means; ``mask_BS`` is bool."""
    mean_B = values_BS.masked_fill(~mask_BS, 0).sum(dim=1) / mask_BS.sum(dim=1).clamp(min=1)
    return mean_B.sum() / norm.global_valid_seqs
