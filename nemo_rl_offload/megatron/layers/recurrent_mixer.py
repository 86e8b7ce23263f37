"""What recurrent layers in plain torch have in common, which stand where a transformer layer has its attention.

A projection of the input to several parts, a causal convolution over some of them, a recurrence, a norm with a gate,
and a projection of the output. Their regions have the names of attention's: `qkv_linear` around the first projection
(whose norm is `attn_norm`), `core_attn` around convolution, recurrence and norm, `attn_proj` around the last one.

A sequence of a pack is a row of its own here, as long as the longest: a pack of very unequal lengths computes its
padding. Sampling keeps the state, and the inputs that the convolution still reads, in Megatron's inference context.

Context-parallel ranks exchange positions for heads in front of the convolution, and back behind the recurrence, as
Megatron's `MambaContextParallel` does: a rank has whole sequences of its heads meanwhile, in their order. Parameters
stay whole; a rank's heads give their part of the gradient, and Megatron sums the ranks'. Gate and norm, which look at
one position, stay where the positions are, so that ranks may share the heads of a group. What goes back is float32,
the recurrence's own type: the norm sees the numbers that it sees on one rank, at the price of twice the bytes.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
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
from nemo_rl_offload.megatron.step.context_parallel import heads_for_positions, positions_for_heads


class RecurrentMixer(MegatronModule):  # type: ignore[misc]
    """[sequence, batch, hidden] in and out, called as attention is. Sizes are those of this tensor-parallel rank."""

    part_names: ClassVar[Sequence[str]]
    """Of what the projection of the input gives, as Megatron names them in checkpoints."""
    convolved: ClassVar[slice]
    """Of these, the parts that the convolution reads."""
    of_all_heads: ClassVar[frozenset[str]] = frozenset()
    """Parameters that every rank has as a whole."""
    in_parts: ClassVar[Mapping[str, slice]]
    """Parameters that are made of parts, row by row."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        pg_collection: ProcessGroupCollection,
        *,
        parts: Sequence[int],
        heads: Sequence[int],
        inner: int,
    ) -> None:
        """`parts`: elements of each; `heads`: of each, or groups of them; `inner`: elements of what is mixed, which the
        last projection reads."""
        super().__init__(config=config)
        self.layer_number, self.tp_group = layer_number, pg_collection.tp
        self.parts, self.heads = list(parts), list(heads)
        num_ranks = pg_collection.tp.size()
        self._recomputes = config.recompute_granularity == "selective" and "core_attn" in config.recompute_modules
        self.in_proj = TorchLayerNormColumnParallelLinear(
            config.hidden_size,
            sum(parts) * num_ranks,
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
            inner * num_ranks,
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            is_expert=False,
            tp_group=pg_collection.tp,
        )

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
        """[sequence, batch, all parts] to [sequence, batch, inner]; the sequences of a pack are one row."""
        parts, gate = list(torch.split(projected, self.parts, dim=-1)), self.part_names.index("z")
        gate_SBI = parts.pop(gate)
        if (num_ranks := self.config.context_parallel_size) == 1:
            return self._gated(self._sequences(torch.cat(parts, dim=-1), pack, context), gate_SBI)
        heads, part = self.heads[:gate] + self.heads[gate + 1 :], None if pack is None else pack.part
        inputs = positions_for_heads(divide_heads(parts, heads, num_ranks, dim=2), part)
        mixed = torch.cat(list(heads_for_positions(self._sequences(inputs, pack, context), part)), dim=-1)
        return self._gated(mixed, gate_SBI)

    def _sequences(self, inputs: Tensor, pack: Any, context: Any) -> Tensor:
        """[whole sequence, batch, own parts but the gate] to [whole sequence, batch, own inner], float32."""
        if pack is None:
            return self._rows(inputs.transpose(0, 1), context).transpose(0, 1)
        rows = self._rows(pad_sequence(list(torch.split(inputs.squeeze(1), pack.lengths)), batch_first=True), None)
        return torch.cat([row[:length] for row, length in zip(rows, pack.lengths, strict=True)]).unsqueeze(1)

    def _rows(self, inputs: Tensor, context: Any) -> Tensor:
        """[batch, sequence, own parts but the gate] to [batch, sequence, own inner], float32: convolution, recurrence.

        Own are all heads of this tensor-parallel rank, or this context-parallel rank's of them.
        """
        raise NotImplementedError

    def _gated(self, mixed_SBI: Tensor, gate_SBI: Tensor) -> Tensor:
        """Gate and norm, of the float32 that `_rows` gives of all heads; contiguous, of the gate's type."""
        raise NotImplementedError

    def _own_parts(self) -> list[int]:
        """Elements of each part but the gate, of this context-parallel rank's heads."""
        num_ranks, parts = self.config.context_parallel_size, zip(self.part_names, self.parts, self.heads, strict=True)
        return [size // number * max(1, number // num_ranks) for name, size, number in parts if name != "z"]

    def _own_rows(self, parameter: Tensor, parts: slice) -> Tensor:
        """Of a parameter that has rows for these parts, those of this context-parallel rank's heads."""
        if (num_ranks := self.config.context_parallel_size) == 1:
            return parameter
        rows = torch.split(parameter, self.parts[parts])
        rank: int = parallel_state.get_context_parallel_rank()
        return divide_heads(rows, self.heads[parts], num_ranks, dim=0)[rank]

    def _with_inputs_before(self, mixed_BCL: Tensor, context: Any) -> tuple[Tensor, Tensor | None]:
        """What the convolution reads, [batch, channels, inputs before + sequence], and the state so far."""
        states = {} if context is None else context.key_value_memory_dict
        before, state = states.get(self.layer_number, (None, None))
        num_before = self.conv1d_weight.shape[-1] - 1
        padded = F.pad(mixed_BCL, (num_before, 0)) if before is None else torch.cat([before, mixed_BCL], dim=-1)
        return padded, state

    def _keep(self, padded_BCL: Tensor, state: Tensor, context: Any) -> None:
        """For the next tokens of these sequences."""
        if context is not None:
            num_before = self.conv1d_weight.shape[-1] - 1
            kept = padded_BCL[..., padded_BCL.shape[-1] - num_before :], state
            context.key_value_memory_dict[self.layer_number] = kept

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
        split = {name: 0 for name in own if name not in self.of_all_heads}
        sharded = make_sharded_tensors_for_checkpoint(own, prefix, split, sharded_offsets, **groups)
        for name, module in self.named_children():
            path = f"{prefix}{name}."
            sharded |= sharded_state_dict_default(module, path, sharded_offsets, metadata, tp_group=self.tp_group)
        for name, parts in self.in_parts.items():
            if (key := f"{prefix}{name}") in sharded:
                sharded[key] = _split_tensor_factory(sharded[key], self.parts[parts], [*self.part_names[parts]], 0)
        return sharded


def divide_heads(parts: Sequence[Tensor], heads: Sequence[int], num_ranks: int, dim: int) -> list[Tensor]:
    """What each context-parallel rank has of `parts` [..., heads x size, ...], which have so many `heads` or groups of
    them each along `dim`: side by side, [..., sum of own heads x size, ...].

    Heads go to the ranks in their order. Where there are fewer than ranks, neighbours have the same one: the group of
    heads that they share. One number must divide the other.
    """
    divided = []
    for part, number in zip(parts, heads, strict=True):
        each = torch.unflatten(part, dim, (number, -1)).repeat_interleave(max(1, num_ranks // number), dim)
        divided.append(each.flatten(dim, dim + 1).chunk(num_ranks, dim))
    return [torch.cat(own, dim) for own in zip(*divided, strict=True)]
