"""A gated delta net in plain torch (Yang, Kautz and Hatamizadeh, arXiv 2412.06464), in the place of attention.

Megatron's own cannot be built without `fla`, which is kernels for CUDA. This one has its parameters and their division
over tensor-parallel ranks by heads. The norm's weight is one for all heads, as transformers has it.

The rule goes by chunks: what the tokens of a chunk give each other is a triangular system, and what earlier chunks
give is one state for each head, handed from chunk to chunk. Everything in it is float32.
"""

from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from nemo_rl_offload.megatron.layers.recurrent_mixer import RecurrentMixer
from nemo_rl_offload.specs.model_shape import DELTA_CHUNK

_LENGTH_EPSILON = 1e-6
"""Of the lengths by which queries and keys are divided, in transformers and `fla`."""


class TorchGatedDeltaNet(RecurrentMixer):
    """K heads of queries and keys, and N heads of values; the parts are queries, keys, values, gate, and beta and decay
    of each head."""

    part_names = ("query", "key", "value", "z", "beta", "alpha")
    convolved = slice(3)
    of_all_heads = frozenset({"out_norm_weight"})
    in_parts = MappingProxyType({"in_proj.weight": slice(None), "conv1d_weight": convolved})

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        pg_collection: ProcessGroupCollection,
        **_unused: object,
    ) -> None:
        num_ranks = pg_collection.tp.size()
        num_key_heads, num_heads = (
            number // num_ranks for number in (config.linear_num_key_heads, config.linear_num_value_heads)
        )
        keys, values = num_key_heads * config.linear_key_head_dim, num_heads * config.linear_value_head_dim
        parts = [keys, keys, values, values, num_heads, num_heads]
        heads = [num_key_heads, num_key_heads, num_heads, num_heads, num_heads, num_heads]
        super().__init__(config, layer_number, pg_collection, parts=parts, heads=heads, inner=values)
        self.key_dim, self.value_dim = config.linear_key_head_dim, config.linear_value_head_dim
        self.conv1d_weight = self._parameter(sum(self.parts[self.convolved]), 1, config.linear_conv_kernel_dim)
        self.dt_bias, self.A_log = (self._parameter(num_heads) for _ in range(2))
        self.out_norm_weight = self._parameter(self.value_dim, is_split=False)

    def _rows(self, inputs: Tensor, context: Any) -> Tensor:
        """[batch, sequence, queries, keys, values, beta and decay] to [batch, sequence, N * values]."""
        *channels, num_heads, _ = self._own_parts()
        mixed, beta, step = torch.split(inputs, [sum(channels), num_heads, num_heads], dim=-1)
        padded, state = self._with_inputs_before(mixed.transpose(1, 2), context)
        weight = self._own_rows(self.conv1d_weight, self.convolved)
        convolved = F.silu(F.conv1d(padded, weight, groups=padded.shape[1])).transpose(1, 2)
        query, key, value = torch.split(convolved.float(), channels, dim=-1)
        query, key = (_of_length_one(torch.unflatten(each, -1, (-1, self.key_dim))) for each in (query, key))
        query, key = (each.repeat_interleave(num_heads // each.shape[2], 2) for each in (query, key))
        value_BLND = torch.unflatten(value, -1, (num_heads, self.value_dim))
        bias_N, a_log_N = (self._own_rows(each, slice(5, 6)).float() for each in (self.dt_bias, self.A_log))
        decay_BLN = -a_log_N.exp() * F.softplus(step.float() + bias_N)
        y, state = delta_rule(query, key, value_BLND, decay_BLN, beta.float().sigmoid(), DELTA_CHUNK, state)
        self._keep(padded, state, context)
        return y.flatten(2)

    def _gated(self, mixed_SBI: Tensor, gate_SBI: Tensor) -> Tensor:
        y, gate = (torch.unflatten(each, -1, (-1, self.value_dim)) for each in (mixed_SBI, gate_SBI))
        normed = F.rms_norm(y, y.shape[-1:], eps=self.config.layernorm_epsilon).to(gate.dtype)
        # Each tensor-parallel rank has the gradient of its own heads.
        weight = tensor_parallel.copy_to_tensor_model_parallel_region(self.out_norm_weight, group=self.tp_group)
        gated: Tensor = (normed * weight) * F.silu(gate.float())
        return gated.to(gate.dtype).flatten(2)


def _of_length_one(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _LENGTH_EPSILON)


def delta_rule(
    query_BLND: Tensor,
    key_BLND: Tensor,
    value_BLNV: Tensor,
    decay_BLN: Tensor,
    beta_BLN: Tensor,
    chunk: int,
    state_BNDV: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Outputs [B, L, N, V] and the last state [B, N, D, V] of the recurrence, in `chunk` tokens at a time; float32.

    At each token the state is multiplied by exp(decay), and beta of what it lacks of the value at the key is added:
    state + k (beta * (v - state^T k))^T. The output is state^T q / sqrt(D). `state_BNDV` is the state before the first
    token; None: zero. The chunks' form is that of section 3.3 of the paper.
    """
    length = query_BLND.shape[1]
    chunk = min(chunk, length)
    # A key of 0 leaves the state as it is.
    query, key, value, decay, beta = (
        torch.unflatten(F.pad(each, (0, 0) * (each.ndim - 2) + (0, -length % chunk)), 1, (-1, chunk)).transpose(2, 3)
        for each in (query_BLND * query_BLND.shape[-1] ** -0.5, key_BLND, value_BLNV, decay_BLN, beta_BLN)
    )  # [B, chunks, N, L, ...]
    total = decay.cumsum(-1)
    is_later = torch.ones(chunk, chunk, dtype=torch.bool, device=query.device).triu(1)
    kept = (total[..., :, None] - total[..., None, :]).masked_fill(is_later, -torch.inf).exp()
    weighted = key * beta[..., None]
    system = (weighted @ key.transpose(-1, -2) * kept).tril(-1)
    known = torch.cat([value * beta[..., None], weighted * total.exp()[..., None]], dim=-1)
    solved = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
    values, of_state = torch.split(solved, [value.shape[-1], key.shape[-1]], dim=-1)
    within = query @ key.transpose(-1, -2) * kept
    from_state = query * total.exp()[..., None]
    to_state = (key * (total[..., -1:] - total).exp()[..., None]).transpose(-1, -2)
    state = torch.zeros_like(to_state[:, 0] @ values[:, 0]) if state_BNDV is None else state_BNDV
    outputs = []
    for number in range(query.shape[1]):
        added = values[:, number] - of_state[:, number] @ state
        outputs.append(from_state[:, number] @ state + within[:, number] @ added)
        state = state * total[:, number, :, -1].exp()[..., None, None] + to_state[:, number] @ added
    return torch.stack(outputs, dim=1).transpose(2, 3).flatten(1, 2)[:, :length], state
