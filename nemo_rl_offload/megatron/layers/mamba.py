"""A Mamba-2 mixer in plain torch (Dao and Gu, arXiv 2405.21060), where a transformer layer has its attention.

Megatron's own mixer cannot be built without `mamba_ssm` and `causal_conv1d`, which are kernels for CUDA. This one has
its parameters and their division over tensor-parallel ranks by heads and groups.

The scan goes by chunks: what the tokens of a chunk give each other is a product of matrices, as in attention, and what
earlier chunks give is one state for each head, handed from chunk to chunk. Everything in it is float32. The limit: a
product has a chunk's tokens squared for each head, all of which autograd keeps; Megatron's kernels compute it again.
"""

from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from nemo_rl_offload.megatron.layers.recurrent_mixer import RecurrentMixer


class TorchMambaMixer(RecurrentMixer):
    """N heads of D elements in G groups, and S elements of state; the parts are gate, x, B, C, and each head's step."""

    part_names = ("z", "x", "B", "C", "dt")
    convolved = slice(1, 4)
    in_parts = MappingProxyType(
        {
            **dict.fromkeys(("in_proj.weight", "in_proj.adapter.linear_out.weight"), slice(None)),
            **dict.fromkeys(("conv1d_weight", "conv1d_bias"), convolved),
        }
    )

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        pg_collection: ProcessGroupCollection,
        **_unused: object,
    ) -> None:
        num_ranks = pg_collection.tp.size()
        num_heads, num_groups = config.mamba_num_heads // num_ranks, config.mamba_num_groups // num_ranks
        inner, of_groups = num_heads * config.mamba_head_dim, num_groups * config.mamba_state_dim
        parts = [inner, inner, of_groups, of_groups, num_heads]
        heads = [num_heads, num_heads, num_groups, num_groups, num_heads]
        super().__init__(config, layer_number, pg_collection, parts=parts, heads=heads, inner=inner)
        self.num_groups, self.head_dim, self.state_dim = num_groups, config.mamba_head_dim, config.mamba_state_dim
        num_channels = sum(self.parts[self.convolved])
        self.conv1d_weight = self._parameter(num_channels, 1, config.mamba_conv_kernel)
        self.conv1d_bias = self._parameter(num_channels)
        self.dt_bias, self.A_log, self.D = (self._parameter(num_heads) for _ in range(3))
        self.norm_weight = self._parameter(inner)

    def _rows(self, inputs: Tensor, context: Any) -> Tensor:
        """[batch, sequence, x, B, C and step] to [batch, sequence, N * D]."""
        *channels, num_heads = self._own_parts()
        mixed, step = torch.split(inputs, [sum(channels), num_heads], dim=-1)
        padded, state = self._with_inputs_before(mixed.transpose(1, 2), context)
        weight, bias = (self._own_rows(each, self.convolved) for each in (self.conv1d_weight, self.conv1d_bias))
        convolved = F.conv1d(padded, weight, bias, groups=padded.shape[1])
        x, b, c = torch.split(F.silu(convolved).transpose(1, 2).float(), channels, dim=-1)
        x_BLND = torch.unflatten(x, -1, (num_heads, self.head_dim))
        b_BLGS, c_BLGS = (torch.unflatten(each, -1, (-1, self.state_dim)) for each in (b, c))
        bias_N, a_log_N, d_N = (
            self._own_rows(each, slice(4, 5)).float() for each in (self.dt_bias, self.A_log, self.D)
        )
        step_BLN = F.softplus(step.float() + bias_N)
        y, state = scan(x_BLND, step_BLN, -a_log_N.exp(), b_BLGS, c_BLGS, self.config.mamba_chunk_size, state)
        self._keep(padded, state, context)
        return (y + x_BLND * d_N[:, None]).flatten(2)

    def _gated(self, mixed_SBI: Tensor, gate_SBI: Tensor) -> Tensor:
        y = torch.unflatten(mixed_SBI * F.silu(gate_SBI.float()), -1, (self.num_groups, -1))
        normed = F.rms_norm(y, y.shape[-1:], eps=self.config.layernorm_epsilon)
        return normed.flatten(2).to(gate_SBI.dtype) * self.norm_weight


def scan(
    x_BLND: Tensor,
    step_BLN: Tensor,
    decay_N: Tensor,
    b_BLGS: Tensor,
    c_BLGS: Tensor,
    chunk: int,
    state_BNDS: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Outputs [B, L, N, D] and the last state [B, N, D, S] of the recurrence, in `chunk` tokens at a time; float32.

    At each token the state becomes exp(step * decay) * state + step * x b^T, and the output is that times c. Heads of a
    group share b and c. `state_BNDS` is the state before the first token; None: zero.
    """
    length, num_groups = x_BLND.shape[1], b_BLGS.shape[2]
    chunk = min(chunk, length)
    # A step of 0 leaves the state as it is.
    x, step, b, c = (
        torch.unflatten(F.pad(each, (0, 0) * (each.ndim - 2) + (0, -length % chunk)), 1, (-1, chunk))
        for each in (x_BLND, step_BLN, b_BLGS, c_BLGS)
    )
    x = torch.unflatten(x * step[..., None], 3, (num_groups, -1))  # [B, chunks, L, G, N / G, D]
    total = torch.unflatten((step * decay_N).cumsum(2), 3, (num_groups, -1))  # [B, chunks, L, G, N / G]
    by_head = total.permute(0, 1, 3, 4, 2)
    is_later = torch.ones(chunk, chunk, dtype=torch.bool, device=x.device).triu(1)
    decay = (by_head[..., :, None] - by_head[..., None, :]).masked_fill(is_later, -torch.inf).exp()
    weights = torch.einsum("zclgs,zcmgs->zcglm", c, b)[:, :, :, None] * decay
    within = torch.einsum("zcgnlm,zcmgnd->zclgnd", weights, x)

    added = torch.einsum("zcmgnd,zcmgs->zcgnds", x * (total[:, :, -1:] - total).exp()[..., None], b)
    kept = total[:, :, -1].exp()[..., None, None]
    state = torch.zeros_like(added[:, 0]) if state_BNDS is None else torch.unflatten(state_BNDS, 1, (num_groups, -1))
    states = []
    for number in range(added.shape[1]):
        states.append(state)
        state = state * kept[:, number] + added[:, number]
    before = torch.einsum("zclgs,zcgnds->zclgnd", c, torch.stack(states, dim=1)) * total.exp()[..., None]
    return (within + before).flatten(1, 2).flatten(2, 3)[:, :length], state.flatten(1, 2)
