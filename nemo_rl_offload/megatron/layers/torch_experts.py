"""The linear of a group of experts on `torch.nn.functional.grouped_mm`, under Transformer Engine's parameter names.

Every expert keeps a parameter of its own (`weight0..N`), because checkpoints, Megatron-Bridge and the distributed
optimizer know them so; behind them stands one contiguous storage, which one grouped product reads as
[experts, out, in].
Parameters are registered last expert first: Megatron's gradient buffers lay parameters out in reverse order, so the
experts stay ascending, at equal distances, also when the distributed optimizer has moved them into its buffer. Where
they are not (someone assigned a parameter of its own), the weights are stacked for the product.

The autograd function saves the input and the parameters themselves: a stack or a view of the storage made in the
forward would be saved, and offloaded, whole.

With `expert_tensor_parallel_size` above 1 a rank has a part of each expert's width: rows of the first linear's weights
and columns of the second's, whose outputs are parts of a sum. Megatron's token dispatchers gather the tokens of those
ranks before, and add the parts up behind; here nothing is sent.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
)
from megatron.core.utils import divide
from torch import Tensor

from nemo_rl_offload.adapters.megatron_core.interface import offload_region
from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.megatron.layers.static_experts import GroupEnds
from nemo_rl_offload.specs.parallel_layout import grouped_rows_problem


def expert_stack(weights: tuple[Tensor, ...]) -> Tensor:
    """The experts' weights [out, in] as one [experts, out, in]: a view where they lie equally spaced in one storage."""
    first = weights[0]
    if len(weights) == 1:
        return first.unsqueeze(0)
    offsets = [weight.storage_offset() for weight in weights]
    distance = offsets[1] - offsets[0]
    pointer = first.untyped_storage().data_ptr()
    in_one_storage = all(weight.untyped_storage().data_ptr() == pointer for weight in weights)
    evenly = all(b - a == distance for a, b in pairwise(offsets))
    if in_one_storage and evenly and distance >= first.numel():
        return first.as_strided((len(weights), *first.shape), (distance, first.shape[1], 1))
    return torch.stack(weights)


class _GroupedLinear(torch.autograd.Function):
    """y[t] = x[t] @ weights[expert of t]^T for tokens sorted by expert; `offsets` are the groups' ends, int32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, offsets: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, offsets, *weights)
        return F.grouped_mm(x, expert_stack(weights).transpose(-2, -1), offs=offsets)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, offsets, *weights = ctx.saved_tensors
        if x.shape[0] == 0:  # no token came to this rank's experts, and grouped_mm takes no product over nothing
            return torch.zeros_like(x), None, *map(torch.zeros_like, weights)
        dy = dy.contiguous()
        dx = F.grouped_mm(dy, expert_stack(tuple(weights)), offs=offsets) if ctx.needs_input_grad[0] else None
        dw = F.grouped_mm(dy.transpose(0, 1), x, offs=offsets)
        is_idle = offsets.diff(prepend=offsets.new_zeros(1)) == 0
        dw.masked_fill_(is_idle[:, None, None], 0)  # which Blackwell's kernel leaves unwritten: pytorch issue 172439
        return dx, None, *dw.unbind(0)


def has_expert_groups(config: TransformerConfig) -> bool:
    """Whether the ranks that hold the same weights of experts are others than those of dense layers.

    By them Megatron reduces gradients, and it calls this `use_expert_pgs`.
    """
    has_own_tensor_groups: bool = config.expert_tensor_parallel_size != config.tensor_model_parallel_size
    return has_own_tensor_groups or config.expert_model_parallel_size > 1


class TorchGroupedLinear(torch.nn.Module):
    """Linear layers of this rank's experts: [tokens sorted by expert, in] to [tokens, out], of which `in` or `out` is
    this rank's part.

    Takes the place of Transformer Engine's grouped linear in Megatron's `TEGroupedMLP`. Raises ConfigError for a part
    whose rows no product takes, and for biases behind buffers of a fixed size.
    """

    partition_dims: ClassVar[dict[str, int]]
    """Of the parameters that expert-tensor-parallel ranks share, by name, the axis."""
    save_original_input = (
        False  # Megatron's set_save_original_input asks for this attribute; the input is saved as it is
    )

    def __init__(
        self,
        num_local_experts: int,
        input_size: int,
        output_size: int,
        /,
        *,
        config: TransformerConfig,
        init_method: Callable[[Tensor], object],
        bias: bool,
        pg_collection: ProcessGroupCollection,
        **_unused: object,
    ) -> None:
        super().__init__()
        self.config, num_parts = config, pg_collection.expt_tp.size()
        if bias and config.moe_expert_rank_capacity_factor is not None:
            raise ConfigError("policy.megatron_cfg.moe_expert_rank_capacity_factor: not for experts with biases")
        self.num_local_experts, self.pg_collection = num_local_experts, pg_collection
        self.num_gemms = num_local_experts  # Transformer Engine's name of it, by which Bridge's adapters ask
        shape, width = [output_size, input_size], config.moe_ffn_hidden_size
        if problem := grouped_rows_problem(width, num_parts, config.params_dtype.itemsize):
            raise ConfigError(f"policy.megatron_cfg.expert_tensor_parallel_size: {problem}")
        shape[self.partition_dims["weight"]] = divide(shape[self.partition_dims["weight"]], num_parts)
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        storage = torch.empty(num_local_experts, *shape, dtype=config.params_dtype, device=device)
        biases = torch.zeros(num_local_experts, shape[0], dtype=config.params_dtype, device=device)
        self._parts = ("weight", "bias") if bias else ("weight",)
        for name, values in zip(self._parts, (storage, biases), strict=False):
            for expert in reversed(range(num_local_experts)):
                parameter = torch.nn.Parameter(values[expert])
                parameter.allreduce = not has_expert_groups(config)  # type: ignore[attr-defined]
                if name in self.partition_dims:
                    set_tensor_model_parallel_attributes(parameter, True, self.partition_dims[name], 1)
                self.register_parameter(f"{name}{expert}", parameter)
        for expert in range(num_local_experts):
            init_method(getattr(self, f"weight{expert}"))

    def _all(self, name: str) -> list[Tensor]:
        return [getattr(self, f"{name}{expert}") for expert in range(self.num_local_experts)]

    def _product(self, x: Tensor, ends: Tensor) -> Tensor:
        return _GroupedLinear.apply(x, ends, *self._all("weight"))  # type: ignore[no-any-return,no-untyped-call]

    def _biases(self) -> list[Tensor] | None:
        return self._all("bias") if "bias" in self._parts else None

    def backward_dw(self) -> None:
        """Weight gradients are never delayed here; Megatron calls this where they may be."""

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, object] | None = None,
    ) -> ShardedStateDict:
        """One sharded tensor for each expert, under the keys Transformer Engine's grouped linear writes."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        groups = self.pg_collection
        num_global_experts = groups.ep.size() * self.num_local_experts
        sharded: ShardedStateDict = {}
        for expert in range(self.num_local_experts):
            index = groups.ep.rank() * self.num_local_experts + expert
            piece = make_sharded_tensors_for_checkpoint(
                {f"{expert}.{name}": getattr(self, f"{name}{expert}") for name in self._parts},
                "",
                {f"{expert}.{name}": axis for name, axis in self.partition_dims.items()},
                (*sharded_offsets, (len(sharded_offsets), index, num_global_experts)),
                tp_group=groups.expt_tp,
                dp_cp_group=metadata["dp_cp_group"],
            )
            replace_prefix_for_sharding(piece, f"{expert}.", prefix)
            for name in self._parts:
                tensor = piece[f"{expert}.{name}"]
                tensor.replica_id = (*tensor.replica_id[:2], groups.expt_dp.rank())
                sharded[f"{prefix}{name}{expert}"] = tensor
        return sharded


def _ends(tokens_per_expert: list[int] | GroupEnds, device: torch.device) -> Tensor:
    """Where each expert's rows end, int32 [experts]."""
    if isinstance(tokens_per_expert, GroupEnds):
        return tokens_per_expert.ends
    return torch.tensor(tokens_per_expert, device=device).cumsum(0).to(torch.int32)


class TorchColumnParallelGroupedLinear(TorchGroupedLinear):
    """The first linear of experts, [tokens, in] to this rank's part of [tokens, out], which adds its biases.

    Megatron opens the region `expert_fc1` around it.
    """

    partition_dims: ClassVar = {"weight": 0, "bias": 0}

    def forward(self, x: Tensor, tokens_per_expert: list[int] | GroupEnds) -> tuple[Tensor, None]:
        ends = _ends(tokens_per_expert, x.device)
        y, biases = self._product(x, ends), self._biases()
        if biases is not None:
            y = y + torch.stack(biases).repeat_interleave(ends.diff(prepend=ends.new_zeros(1)), dim=0)
        return y, None


class TorchRowParallelGroupedLinear(TorchGroupedLinear):
    """The second linear of experts, the region `expert_fc2`: from this rank's part of [tokens, in] to [tokens, out].

    It returns its biases, a tensor an expert, since Megatron weighs them by the router's probabilities.
    """

    partition_dims: ClassVar = {"weight": 1}

    def forward(self, x: Tensor, tokens_per_expert: list[int] | GroupEnds) -> tuple[Tensor, list[Tensor] | None]:
        region = offload_region(self.config, x, "expert_fc2", self.training)
        with region as x:
            y = self._product(x, _ends(tokens_per_expert, x.device))
        return region.group_offload(y), self._biases()
