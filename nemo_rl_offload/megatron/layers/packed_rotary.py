"""Rotary positions of packs, without asking the device where their sequences end.

Megatron's own form (without `apply_rope_fusion`) copies a pack's bounds from the device, twice for queries and twice
for keys of every layer, and waits for them with nothing queued on the device meanwhile. Where activations leave over
the link, those few bytes wait for them besides (`routing_result`). Then it rotates sequence by sequence, a dozen
kernels each. Here the host knows the lengths, and a pack is rotated at once by a table that has a row a token: the same
operations on the same numbers.

Rejected: Transformer Engine's kernel wherever it is there. It rounds otherwise, which is the user's choice.
Limit: packs that nobody announced are Megatron's.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core.models.common.embeddings import rope_utils
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from nemo_rl_offload.batching.context_parts import pieces_of

_megatrons = rope_utils._apply_rotary_pos_emb_thd


_lengths = WeakIdKeyDictionary()  # of packs, by their bounds
_tables = WeakIdKeyDictionary()  # angles and table of the pack last rotated; a step's packs live until its end


def announce_pack(bounds: Tensor, lengths: Sequence[int]) -> None:
    """Let whatever is rotated by `bounds` (`cu_seqlens`, int32 [sequences + 1]) be rotated by `lengths`, which are the
    same on the host, as long as that tensor lives."""
    _lengths[bounds] = tuple(lengths)
    rope_utils._apply_rotary_pos_emb_thd = rotate_pack


def rotate_pack(t: Tensor, cu_seqlens: Tensor, freqs: Tensor, *, cp_group: dist.ProcessGroup, **how: object) -> Tensor:
    """Megatron's `_apply_rotary_pos_emb_thd`: `t` [tokens, heads, dim], this context-parallel rank's part of the pack,
    rotated by `freqs` [longest, 1, 1, dim], from each sequence's start on."""
    lengths: tuple[int, ...] | None = _lengths.get(cu_seqlens)  # type: ignore[no-untyped-call]
    if lengths is None or freqs.shape[0] > max(lengths):
        return _megatrons(t, cu_seqlens, freqs, cp_group=cp_group, **how)  # type: ignore[no-any-return]
    angles, table = _tables.get(cu_seqlens, (None, None))  # type: ignore[no-untyped-call]
    if angles is not freqs:
        table = torch.cat([piece for length in lengths for piece in _own(freqs[:length], cp_group)])
        _tables.clear()
        _tables[cu_seqlens] = freqs, table
    return rope_utils._apply_rotary_pos_emb_bshd(t.unsqueeze(1), table, **how).squeeze(1)  # type: ignore[no-any-return]


def _own(angles: Tensor, cp_group: dist.ProcessGroup) -> Sequence[Tensor]:
    """The pieces of a sequence's angles that a context-parallel rank needs."""
    if cp_group.size() == 1:
        return [angles]
    pieces = angles.chunk(2 * cp_group.size())
    return [pieces[index] for index in pieces_of(cp_group.rank(), cp_group.size())]
