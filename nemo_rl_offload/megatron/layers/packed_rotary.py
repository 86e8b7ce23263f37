"""Rotary positions of packs, without asking the device where their sequences end.

Megatron's own form (without `apply_rope_fusion`) copies a pack's bounds from the device, twice for queries and twice
for keys of every layer, and waits for them with nothing queued on the device meanwhile. Where activations leave over
the link, those few bytes wait for them besides (`routing_result`). Then it rotates sequence by sequence, a dozen
kernels each. Here the host knows the lengths, and a pack is rotated at once by tables that have a row a token: the same
operations on the same numbers. The tables, cosines and sines, are made once for all layers of a pack. Megatron makes
them for queries and for keys of every layer, each of which keeps its own for the backward pass: of a pack of 16,384
tokens and 28 layers, 450 MiB.

With Transformer Engine's layers its kernel rotates instead, where it does what the model says.
Limit: packs that nobody announced are Megatron's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from megatron.core.models.common.embeddings import rope_utils
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from nemo_rl_offload.batching.context_parts import pieces_of

_megatrons = rope_utils._apply_rotary_pos_emb_thd


_lengths = WeakIdKeyDictionary()  # of packs, by their bounds
_tables = WeakIdKeyDictionary()  # of the pack last rotated, by its bounds; a step's packs live until its end


@dataclass
class _Tables:
    """Of one pack: a row for each of this rank's tokens."""

    freqs: Tensor
    """The angles [longest, 1, 1, dim] that they are of."""
    angles: Tensor
    """[tokens, 1, 1, dim]"""
    waves: dict[tuple[torch.dtype, float], tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Cosines and sines like `angles`, by type and scale."""


def announce_pack(bounds: Tensor, lengths: Sequence[int]) -> None:
    """Let whatever is rotated by `bounds` (`cu_seqlens`, int32 [sequences + 1]) be rotated by `lengths`, which are the
    same on the host, as long as that tensor lives."""
    _lengths[bounds] = tuple(lengths)
    rope_utils._apply_rotary_pos_emb_thd = rotate_pack


def rotate_pack(
    t: Tensor,
    cu_seqlens: Tensor,
    freqs: Tensor,
    rotary_interleaved: bool = False,
    mla_rotary_interleaved: bool = False,
    mscale: float = 1.0,
    *,
    cp_group: dist.ProcessGroup,
) -> Tensor:
    """Megatron's `_apply_rotary_pos_emb_thd`: `t` [tokens, heads, dim], this context-parallel rank's part of the pack,
    rotated by `freqs` [longest, 1, 1, dim], from each sequence's start on."""
    lengths: tuple[int, ...] | None = _lengths.get(cu_seqlens)  # type: ignore[no-untyped-call]
    if lengths is None or freqs.shape[0] > max(lengths):
        how = {"rotary_interleaved": rotary_interleaved, "mla_rotary_interleaved": mla_rotary_interleaved}
        return _megatrons(t, cu_seqlens, freqs, mscale=mscale, cp_group=cp_group, **how)  # type: ignore[no-any-return]
    tables: _Tables | None = _tables.get(cu_seqlens)  # type: ignore[no-untyped-call]
    if tables is None or tables.freqs is not freqs:
        angles = torch.cat([piece for length in lengths for piece in _own(freqs[:length], cp_group)])
        tables = _Tables(freqs, angles)
        _tables.clear()
        _tables[cu_seqlens] = tables
    if (key := (t.dtype, mscale)) not in tables.waves:
        cosines, sines = torch.cos(tables.angles), torch.sin(tables.angles)
        tables.waves[key] = (cosines * mscale).to(t.dtype), (sines * mscale).to(t.dtype)
    cosines, sines = tables.waves[key]
    t, dim = t.unsqueeze(1), freqs.shape[-1]
    rotated, rest = t[..., :dim], t[..., dim:]
    if mla_rotary_interleaved:
        rotated = torch.cat((rotated[..., 0::2], rotated[..., 1::2]), dim=-1)
    rotated = rotated * cosines + rope_utils._rotate_half(rotated, rotary_interleaved) * sines
    return torch.cat((rotated, rest), dim=-1).squeeze(1)


def _own(angles: Tensor, cp_group: dist.ProcessGroup) -> Sequence[Tensor]:
    """The pieces of a sequence's angles that a context-parallel rank needs."""
    if cp_group.size() == 1:
        return [angles]
    pieces = angles.chunk(2 * cp_group.size())
    return [pieces[index] for index in pieces_of(cp_group.rank(), cp_group.size())]
