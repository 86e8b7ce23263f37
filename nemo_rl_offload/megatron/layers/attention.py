"""Attention in plain torch: scaled dot products, of packs and of context-parallel ranks too, and latent attention.

Every form of it comes down to one call, `_attend`, on queries that are the last ones of its keys: whole sequences, a
sequence of a pack, a rank's chunk with the keys up to its end, and the new token of a decoding step with the cache. So
a sliding window and a causal mask have one meaning, by the distance of a query from its key.

Fused operators take a window as a mask that all heads share. Attention sinks, a learned logit of each head that takes
its part of the softmax (gpt-oss), have no fused operator in torch: there the scores of each head, query and key are
written out. Transformer Engine has kernels for both.

A pack on a GPU is one call of torch's kernel for sequences of any lengths, windows among them, where that takes the
types and widths. Elsewhere each sequence is a call of its own, which computes no more, but whose host time is that of
28 layers and 50 short responses: more than the device needs for the whole pack.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)
from torch import Tensor
from torch.nn.attention.bias import CausalBias, causal_lower_right
from torch.nn.attention.varlen import varlen_attn

from nemo_rl_offload.batching.context_parts import pieces_of
from nemo_rl_offload.megatron.step.context_parallel import gather_sequence


class TorchDotProductAttention(MegatronModule):  # type: ignore[misc]
    """`torch.nn.functional.scaled_dot_product_attention` in Megatron's layout.

    query [sq, b, heads / TP, d_qk], key [sk, b, groups / TP, d_qk], value [sk, b, groups / TP, d_v] (latent attention
    has d_v unlike d_qk); the result is [sq, b, heads / TP * d_v]. `attention_mask` is boolean, True where attention is
    forbidden, and broadcasts to [b, heads, sq, sk]; without one, a causal mask type is causal by position and `no_mask`
    attends everywhere.

    Context-parallel ranks gather keys and values of the whole sequence, and attend from their own chunks of it. That
    sends no more than passing them around in a ring would, in one piece; the price is that a layer holds them whole.

    A pack (`packed_seq_params` with `lengths`) has tokens in the place of sq and no b, and so has the result: [tokens,
    heads / TP * d_v]. One call with a block-causal mask would compute, and mask, the square of the whole pack.
    Context-parallel ranks gather the keys and
    values of the whole pack, at once, and attend from their chunks of each sequence.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **_unused: object,
    ) -> None:
        super().__init__(config=config)
        is_windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window = config.window_size[0] + 1 if is_windowed else None
        """How many keys a query sees, its own among them; None: all before it."""
        self.softmax_offset = None
        if config.softmax_type == "learnable":
            device = None if config.use_cpu_initialization else torch.cuda.current_device()
            num_heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.softmax_offset = torch.nn.Parameter(torch.empty(num_heads, dtype=config.params_dtype, device=device))
            set_tensor_model_parallel_attributes(
                self.softmax_offset, True, 0, 1
            )  # or the norm of gradients leaves it out
        assert config.softmax_type in ("vanilla", "learnable"), "no model asks for another one"
        self.attn_mask_type = attn_mask_type
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.softmax_scale = softmax_scale
        if config.apply_query_key_layer_scaling:
            scale = softmax_scale or config.kv_channels**-0.5
            self.softmax_scale = scale / max(1, layer_number)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        assert attention_bias is None, "not taken by this backend"
        if packed_seq_params is not None:
            attend = self._attend_packed if packed_seq_params.part is None else self._attend_packed_split
            return attend(query, key, value, packed_seq_params)
        mask_type = attn_mask_type or self.attn_mask_type
        if self.config.context_parallel_size > 1:
            assert mask_type == AttnMaskType.causal
            assert attention_mask is None
            return self._attend_split(query, key, value)
        # A single new token sees the whole cache; torch's `is_causal` would align it with the cache's start.
        causal = mask_type in (AttnMaskType.causal, AttnMaskType.padding_causal) and attention_mask is None
        allowed = None if attention_mask is None or mask_type == AttnMaskType.no_mask else ~attention_mask
        return self._attend(query, key, value, allowed, causal)

    def _attend_packed(self, query_TND: Tensor, key_TGD: Tensor, value_TGD: Tensor, pack: Any) -> Tensor:
        if self._takes_whole_packs(query_TND, value_TGD):
            bounds, longest = pack.cu_seqlens_q, max(pack.lengths)
            window = -1 if self.window is None else self.window - 1, 0  # keys before and after a query's own
            attend = partial(varlen_attn, scale=self.softmax_scale, window_size=window)
            attended = attend(query_TND, key_TGD, value_TGD, bounds, bounds, longest, longest)
            assert isinstance(attended, Tensor), "nothing else is asked for"
            return attended.flatten(1)
        parts = (torch.split(t.unsqueeze(1), list(pack.lengths)) for t in (query_TND, key_TGD, value_TGD))
        return torch.cat([self._attend(q, k, v, None, True).squeeze(1) for q, k, v in zip(*parts, strict=True)])

    def _takes_whole_packs(self, query: Tensor, value: Tensor) -> bool:
        """What torch's flash attention asks for; it has no dropout here, and no sinks."""
        width, is_plain = query.shape[-1], self.softmax_offset is None and not (self.training and self.dropout)
        is_half = query.dtype in (torch.bfloat16, torch.float16)
        return query.is_cuda and is_half and is_plain and width == value.shape[-1] and width <= 256 and width % 8 == 0

    def _attend_packed_split(self, query_TND: Tensor, key_TGD: Tensor, value_TGD: Tensor, pack: Any) -> Tensor:
        lengths, num_ranks = list(pack.lengths), self.config.context_parallel_size
        queries = torch.split(query_TND.unsqueeze(1), [length // num_ranks for length in lengths])
        gathered = (gather_sequence(t, sums_gradients=True, part=pack.part) for t in (key_TGD, value_TGD))
        keys, values = (torch.split(t.unsqueeze(1), lengths) for t in gathered)
        parts = zip(queries, keys, values, strict=True)
        return torch.cat([self._attend_chunks(query, key, value).squeeze(1) for query, key, value in parts])

    def _attend_split(self, query_SBND: Tensor, key_SBGD: Tensor, value_SBGD: Tensor) -> Tensor:
        key, value = (gather_sequence(part, sums_gradients=True) for part in (key_SBGD, value_SBGD))
        return self._attend_chunks(query_SBND, key, value)

    def _attend_chunks(self, query_SBND: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """From this rank's two chunks of a sequence, whose keys and values are whole."""
        num_ranks, rank = self.config.context_parallel_size, parallel_state.get_context_parallel_rank()
        length = query_SBND.shape[0] // 2
        parts = []
        for query, chunk in zip(torch.split(query_SBND, length), pieces_of(rank, num_ranks), strict=True):
            seen = (chunk + 1) * length
            # The last query sees the last of these keys; torch's `is_causal` aligns the first ones.
            parts.append(self._attend(query, key[:seen], value[:seen], causal_lower_right(length, seen), False))
        return torch.cat(parts)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, allowed: Tensor | None, causal: bool) -> Tensor:
        """The queries are the last ones of the keys. `allowed`: a boolean mask, or torch's own of a causal form."""
        dropout = self.dropout if self.training else 0.0
        q_BNSD, k_BGSD, v_BGSD = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        sinks = self.softmax_offset
        if sinks is not None or self.window is not None:
            allowed, causal = self._mask(query.shape[0], key.shape[0], allowed, query.device), False

        def attend() -> Tensor:
            if sinks is not None:
                assert allowed is not None
                return self._attend_beside_sinks(q_BNSD, k_BGSD, v_BGSD, allowed, sinks, dropout)
            return F.scaled_dot_product_attention(
                q_BNSD,
                k_BGSD,
                v_BGSD,
                attn_mask=allowed,
                is_causal=causal,
                dropout_p=dropout,
                scale=self.softmax_scale,
                enable_gqa=q_BNSD.shape[1] != k_BGSD.shape[1],
            )

        if dropout > 0 and not self.config.sequence_parallel:
            with get_cuda_rng_tracker().fork():
                out_BNSD = attend()
        else:
            out_BNSD = attend()
        return out_BNSD.permute(2, 0, 1, 3).flatten(2)

    def _mask(self, num_queries: int, num_keys: int, allowed: Tensor | None, device: torch.device) -> Tensor:
        """Which keys each query sees, bool [queries, keys]: none behind it, none before its window, none forbidden."""
        keys = torch.arange(num_keys, device=device)
        distance = keys[num_keys - num_queries :, None] - keys
        seen = distance >= 0 if self.window is None else (distance >= 0) & (distance < self.window)
        return seen if allowed is None or isinstance(allowed, CausalBias) else seen & allowed

    def _attend_beside_sinks(
        self, q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, sinks: Tensor, dropout: float
    ) -> Tensor:
        """q [b, heads, sq, d], k and v [b, groups, sk, d], sinks [heads]; the result is [b, heads, sq, d]."""
        num_shared = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(num_shared, 1), v.repeat_interleave(num_shared, 1)
        scores_BNSK = (
            q @ k.transpose(2, 3) * (q.shape[-1] ** -0.5 if self.softmax_scale is None else self.softmax_scale)
        )
        scores_BNSK = scores_BNSK.masked_fill(~allowed, -torch.inf)
        sinks_BNS1 = sinks.view(1, -1, 1, 1).expand(*scores_BNSK.shape[:3], 1).to(scores_BNSK.dtype)
        scores_BNSK = torch.cat([scores_BNSK, sinks_BNS1], dim=-1)
        weights = F.dropout(torch.softmax(scores_BNSK, -1, dtype=torch.float32).to(q.dtype), dropout)
        return weights[..., : v.shape[2]] @ v

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> ShardedStateDict:
        """The sinks, split by heads, under Transformer Engine's name."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            dp_cp_group=ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"],
        )


class TorchMLASelfAttention(MLASelfAttention):  # type: ignore[misc]
    """Megatron's latent attention built from the classes of its specification as they are.

    Megatron resolves them by `transformer_impl`, which knows no third kind of layers. It also loses gradients where
    the down-projections are split over tensor-parallel ranks: each rank's heads use the whole rotary part of the key,
    and its gradient is not summed over the ranks.
    """

    def _resolve_qk_norm_config(self, submodules: MLASelfAttentionSubmodules) -> dict[str, object]:
        return dict(vars(submodules))

    def _qkv_down_projection(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Queries' and keys' latent [sequence, batch, width]; Megatron splits the second into latent and rotary part.

        With sequence parallelism it gathers the rotary part itself, which sums the gradient.
        """
        q_compressed, kv_combined = super()._qkv_down_projection(hidden_states)
        if self.tp_group.size() == 1:
            return q_compressed, kv_combined
        kv_combined = gather_from_tensor_model_parallel_region(kv_combined, group=self.tp_group)
        if self.config.sequence_parallel:
            return q_compressed, scatter_to_sequence_parallel_region(kv_combined, group=self.tp_group)
        latent, rotary = kv_combined.split([self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim], dim=-1)
        rotary = copy_to_tensor_model_parallel_region(rotary, group=self.tp_group)
        return q_compressed, torch.cat([latent, rotary], dim=-1)
