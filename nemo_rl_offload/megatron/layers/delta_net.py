"""A gated delta net in plain torch (Yang, Kautz and Hatamizadeh, arXiv 2412.06464), in the place of attention.

Megatron's own cannot be built without `fla`, which is kernels for CUDA. This one has its parameters, their division
over tensor-parallel ranks by heads, and its regions by the names of attention's: `qkv_linear` around the projection of
the input (whose norm is `attn_norm`), `core_attn` around the convolution, the delta rule and the gated norm,
`attn_proj` around the projection of the output. The norm's weight is one for all heads, as transformers has it.

The rule goes by chunks: what the tokens of a chunk give each other is a triangular system, and what earlier chunks
give is one state for each head, handed from chunk to chunk. Everything in it is float32.

A sequence of a pack is a row of its own here, as long as the longest. Sampling keeps the state, and the inputs that the
convolution still reads, in Megatron's inference context.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.utils import _split_tensor_factory
from megatron.core.tensor_parallel.layers import RowParallelLinear, set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from nemo_rl_offload.adapters.megatron_core.interface import offload_region
from nemo_rl_offload.megatron.layers.norms import TorchLayerNormColumnParallelLinear

CHUNK = 64
"""Tokens whose triangular system is solved at once, as in transformers."""
_LENGTH_EPSILON = 1e-6
"""Of the lengths by which queries and keys are divided, in transformers and `fla`."""


class TorchGatedDeltaNet(MegatronModule):  # type: ignore[misc]
    """[sequence, batch, hidden] in and out, called as attention is.

    Of the sizes below, those of this tensor-parallel rank: K heads of queries and keys, and N heads of values.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        pg_collection: ProcessGroupCollection,
        **_unused: object,
    ) -> None:
        super().__init__(config=config)
        self.layer_number, self.tp_group = layer_number, pg_collection.tp
        num_ranks = pg_collection.tp.size()
        self.num_key_heads = config.linear_num_key_heads // num_ranks
        self.num_heads = config.linear_num_value_heads // num_ranks
        self.key_dim, self.value_dim = config.linear_key_head_dim, config.linear_value_head_dim
        self._recomputes = config.recompute_granularity == "selective" and "core_attn" in config.recompute_modules
        self.in_proj = TorchLayerNormColumnParallelLinear(
            config.hidden_size,
            sum(self.parts) * num_ranks,
            config=config,
            init_method=config.init_method,
            gather_output=False,
            bias=False,
            skip_bias_add=False,
            is_expert=False,
            tp_comm_buffer_name="qkv",
            tp_group=pg_collection.tp,
        )
        self.out_proj = RowParallelLinear(
            config.linear_num_value_heads * self.value_dim,
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            is_expert=False,
            tp_group=pg_collection.tp,
        )
        self.conv1d_weight = self._parameter(sum(self.parts[:3]), 1, config.linear_conv_kernel_dim)
        self.dt_bias, self.A_log = (self._parameter(self.num_heads) for _ in range(2))
        self.out_norm_weight = self._parameter(self.value_dim, is_split=False)

    @property
    def parts(self) -> list[int]:
        """What the projection of the input gives: queries, keys, values, gate, and beta and decay of each head."""
        keys, values = self.num_key_heads * self.key_dim, self.num_heads * self.value_dim
        return [keys, keys, values, values, self.num_heads, self.num_heads]

    def _parameter(self, *shape: int, is_split: bool = True) -> torch.nn.Parameter:
        device = None if self.config.use_cpu_initialization else torch.cuda.current_device()
        parameter = torch.nn.Parameter(torch.zeros(shape, dtype=self.config.params_dtype, device=device))
        if is_split:
            set_tensor_model_parallel_attributes(parameter, True, 0, 1)
        return parameter

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        inference_context: Any = None,
        packed_seq_params: Any = None,
        **_of_attention: object,
    ) -> tuple[Tensor, Tensor | None]:
        assert attention_mask is None, "padding stands on the right, where a recurrence does not see it"
        linear = offload_region(self.config, hidden_states, "qkv_linear", self.training)
        with linear as x:
            projected, _ = self.in_proj(x)
        projected = linear.group_offload(projected)
        if self._recomputes and self.training:
            mix = partial(self._mix, pack=packed_seq_params)
            mixed = tensor_parallel.checkpoint(mix, False, projected)
        else:
            core = offload_region(self.config, projected, "core_attn", self.training)
            with core as x:
                mixed = self._mix(x, packed_seq_params, inference_context)
            mixed = core.group_offload(mixed)
        proj = offload_region(self.config, mixed, "attn_proj", self.training)
        with proj as x:
            output, bias = self.out_proj(x)
        return proj.group_offload(output), bias

    def _mix(self, projected: Tensor, pack: Any = None, context: Any = None) -> Tensor:
        """[sequence, batch, all parts] to [sequence, batch, N * values]; the sequences of a pack are one row."""
        if pack is None:
            return self._rows(projected.transpose(0, 1), context).transpose(0, 1).contiguous()
        rows = self._rows(pad_sequence(list(torch.split(projected.squeeze(1), pack.lengths)), batch_first=True), None)
        return torch.cat([row[:length] for row, length in zip(rows, pack.lengths, strict=True)]).unsqueeze(1)

    def _rows(self, projected: Tensor, context: Any) -> Tensor:
        """[batch, sequence, all parts] to [batch, sequence, N * values]."""
        mixed, gate, beta, step = torch.split(projected, [sum(self.parts[:3]), *self.parts[3:]], dim=-1)
        states = {} if context is None else context.key_value_memory_dict
        before, state = states.get(self.layer_number, (None, None))
        mixed = mixed.transpose(1, 2)
        num_before = self.conv1d_weight.shape[-1] - 1
        mixed = F.pad(mixed, (num_before, 0)) if before is None else torch.cat([before, mixed], dim=-1)
        convolved = F.silu(F.conv1d(mixed, self.conv1d_weight, groups=mixed.shape[1])).transpose(1, 2)
        query, key, value = torch.split(convolved.float(), self.parts[:3], dim=-1)
        times = self.num_heads // self.num_key_heads
        query, key = (
            _of_length_one(torch.unflatten(each, -1, (self.num_key_heads, self.key_dim))).repeat_interleave(times, 2)
            for each in (query, key)
        )
        value_BLND = torch.unflatten(value, -1, (self.num_heads, self.value_dim))
        decay_BLN = -self.A_log.float().exp() * F.softplus(step.float() + self.dt_bias.float())
        y, state = delta_rule(query, key, value_BLND, decay_BLN, beta.float().sigmoid(), CHUNK, state)
        if context is not None:
            states[self.layer_number] = mixed[..., mixed.shape[-1] - num_before :], state
        normed = F.rms_norm(y, y.shape[-1:], eps=self.config.layernorm_epsilon).to(projected.dtype)
        # Each tensor-parallel rank has the gradient of its own heads.
        weight = tensor_parallel.copy_to_tensor_model_parallel_region(self.out_norm_weight, group=self.tp_group)
        gated = (normed * weight) * F.silu(torch.unflatten(gate, -1, (self.num_heads, self.value_dim)).float())
        mixed_BLN: Tensor = gated.to(projected.dtype).flatten(2)
        return mixed_BLN

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> ShardedStateDict:
        """Every parameter by its heads; what is made of several parts, part by part, as Megatron's has it."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        own: dict[str, Any] = {}
        self._save_to_state_dict(own, "", keep_vars=True)
        groups: Any = {"tp_group": self.tp_group, "dp_cp_group": metadata["dp_cp_group"]}
        split = {name: 0 for name in own if name != "out_norm_weight"}
        sharded = make_sharded_tensors_for_checkpoint(own, prefix, split, sharded_offsets, **groups)
        for name, module in self.named_children():
            path = f"{prefix}{name}."
            sharded |= sharded_state_dict_default(module, path, sharded_offsets, metadata, tp_group=self.tp_group)
        names = ["query", "key", "value", "z", "beta", "alpha"]
        for name, parts in {"in_proj.weight": slice(None), "conv1d_weight": slice(3)}.items():
            key = f"{prefix}{name}"
            sharded[key] = _split_tensor_factory(sharded[key], self.parts[parts], names[parts], 0)
        return sharded


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
