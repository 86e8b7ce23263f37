"""A Mamba-2 mixer in plain torch (Dao and Gu, arXiv 2405.21060), where a transformer layer has its attention.

Megatron's own mixer cannot be built without `mamba_ssm` and `causal_conv1d`, which are kernels for CUDA. This one has
its parameters, their division over tensor-parallel ranks by heads and groups, and its regions by the names of
attention's: `qkv_linear` around the projection of the input (whose norm is `attn_norm`), `core_attn` around the
convolution, the scan and the gated norm, `attn_proj` around the projection of the output.

The scan goes by chunks: what the tokens of a chunk give each other is a product of matrices, as in attention, and what
earlier chunks give is one state for each head, handed from chunk to chunk. Everything in it is float32. The limit: a
product has a chunk's tokens squared for each head, all of which autograd keeps; Megatron's kernels compute it again.

A sequence of a pack is a row of its own here, as long as the longest: a pack of very unequal lengths computes its
padding. Sampling keeps the state, and the inputs that the convolution still reads, in Megatron's inference context.
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


class TorchMambaMixer(MegatronModule):  # type: ignore[misc]
    """[sequence, batch, hidden] in and out, called as attention is.

    Of the sizes below, those of this tensor-parallel rank: N heads of D elements in G groups, and S elements of state.
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
        self.num_heads, self.num_groups = config.mamba_num_heads // num_ranks, config.mamba_num_groups // num_ranks
        self.head_dim, self.state_dim = config.mamba_head_dim, config.mamba_state_dim
        self.inner, self.of_groups = self.num_heads * self.head_dim, self.num_groups * self.state_dim
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
            self.inner * num_ranks,
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            is_expert=False,
            tp_group=pg_collection.tp,
        )
        num_channels = sum(self.parts[1:4])
        self.conv1d_weight = self._parameter(num_channels, 1, config.mamba_conv_kernel)
        self.conv1d_bias = self._parameter(num_channels)
        self.dt_bias, self.A_log, self.D = (self._parameter(self.num_heads) for _ in range(3))
        self.norm_weight = self._parameter(self.inner)

    @property
    def parts(self) -> list[int]:
        """What the projection of the input gives, in this order: gate, x, B, C, and the step of each head."""
        return [self.inner, self.inner, self.of_groups, self.of_groups, self.num_heads]

    def _parameter(self, *shape: int) -> torch.nn.Parameter:
        device = None if self.config.use_cpu_initialization else torch.cuda.current_device()
        parameter = torch.nn.Parameter(torch.zeros(shape, dtype=self.config.params_dtype, device=device))
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
        assert attention_mask is None, "padding stands on the right, where a scan does not see it"
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
        """[sequence, batch, all parts] to [sequence, batch, N * D]; the sequences of a pack are one row."""
        if pack is None:
            return self._rows(projected.transpose(0, 1), context).transpose(0, 1).contiguous()
        rows = self._rows(pad_sequence(list(torch.split(projected.squeeze(1), pack.lengths)), batch_first=True), None)
        return torch.cat([row[:length] for row, length in zip(rows, pack.lengths, strict=True)]).unsqueeze(1)

    def _rows(self, projected: Tensor, context: Any) -> Tensor:
        """[batch, sequence, all parts] to [batch, sequence, N * D]."""
        gate, mixed, step = torch.split(projected, [self.inner, sum(self.parts[1:4]), self.num_heads], dim=-1)
        states = {} if context is None else context.key_value_memory_dict
        before, state = states.get(self.layer_number, (None, None))
        mixed = mixed.transpose(1, 2)
        num_before = self.conv1d_weight.shape[-1] - 1
        mixed = F.pad(mixed, (num_before, 0)) if before is None else torch.cat([before, mixed], dim=-1)
        convolved = F.conv1d(mixed, self.conv1d_weight, self.conv1d_bias, groups=mixed.shape[1])
        x, b, c = torch.split(F.silu(convolved).transpose(1, 2).float(), self.parts[1:4], dim=-1)
        x_BLND = torch.unflatten(x, -1, (self.num_heads, self.head_dim))
        b_BLGS, c_BLGS = (torch.unflatten(each, -1, (self.num_groups, self.state_dim)) for each in (b, c))
        step_BLN = F.softplus(step.float() + self.dt_bias.float())
        decay_N = -self.A_log.float().exp()
        y, state = scan(x_BLND, step_BLN, decay_N, b_BLGS, c_BLGS, self.config.mamba_chunk_size, state)
        if context is not None:
            states[self.layer_number] = mixed[..., mixed.shape[-1] - num_before :], state
        y = (y + x_BLND * self.D.float()[:, None]).flatten(2) * F.silu(gate.float())
        y = torch.unflatten(y, -1, (self.num_groups, -1))
        normed = F.rms_norm(y, y.shape[-1:], eps=self.config.layernorm_epsilon)
        return normed.flatten(2).to(projected.dtype) * self.norm_weight

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> ShardedStateDict:
        """Every parameter by its heads or groups; what is made of several parts, part by part, as Megatron's has it."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        own: dict[str, Any] = {}
        self._save_to_state_dict(own, "", keep_vars=True)
        groups: Any = {"tp_group": self.tp_group, "dp_cp_group": metadata["dp_cp_group"]}
        sharded = make_sharded_tensors_for_checkpoint(own, prefix, dict.fromkeys(own, 0), sharded_offsets, **groups)
        for name, module in self.named_children():
            path = f"{prefix}{name}."
            sharded |= sharded_state_dict_default(module, path, sharded_offsets, metadata, tp_group=self.tp_group)
        names = ["z", "x", "B", "C", "dt"]
        of_parts = {
            **dict.fromkeys(("in_proj.weight", "in_proj.adapter.linear_out.weight"), slice(None)),
            **dict.fromkeys(("conv1d_weight", "conv1d_bias"), slice(1, 4)),
        }
        for name, parts in of_parts.items():
            if (key := f"{prefix}{name}") not in sharded:
                continue
            sharded[key] = _split_tensor_factory(sharded[key], self.parts[parts], names[parts], 0)
        return sharded


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
