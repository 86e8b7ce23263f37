"""What this project calls on Megatron-Core's own objects, which carry no types for a checker.

Only what has no better name in an annotation stands here: a configuration is Megatron's `TransformerConfig`, and a
chunk without wrappers its `GPTModel`.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn


class GradientBuffer(Protocol):
    """Megatron's `_ParamAndGradBuffer`: parameters of one type and their gradients, contiguous, cut into buckets."""

    grad_data: Tensor
    numel: int
    buckets: Sequence["Bucket"]

    def offload_to_cpu(self, *, move_params: bool, move_grads: bool) -> None: ...

    def reload_from_cpu(self, *, move_params: bool, move_grads: bool) -> None: ...


class Bucket(Protocol):
    """A part of a `GradientBuffer` that is reduced at once; `numel_unpadded` elements from `offset` on."""

    offset: int
    numel_unpadded: int


class DDPConfig(Protocol):
    """Megatron's `DistributedDataParallelConfig`."""

    overlap_param_gather: bool


class ModelChunk(Protocol):
    """A part of the model on this pipeline stage, in Megatron's `DistributedDataParallel`.

    One that is never trained has no such wrapper, and of this only what any module has, and the call.
    """

    config: TransformerConfig
    ddp_config: DDPConfig
    buffers: Sequence[GradientBuffer]
    expert_parallel_buffers: Sequence[GradientBuffer]

    def __call__(
        self, input_ids: Tensor, position_ids: Tensor, attention_mask: Tensor | None, **further: object
    ) -> Any:
        """Logits [b, s, vocabulary / TP], or what an `output_processor` returns; before the last pipeline stage hidden
        states [s, b, hidden].

        `input_ids` and `position_ids` are int64 [b, s]; `attention_mask` is boolean [b, 1, s, s], None: causal.
        """

    def modules(self) -> Iterator[nn.Module]: ...

    def train(self) -> object: ...

    def eval(self) -> object: ...

    def zero_grad_buffer(self) -> None: ...

    def no_sync(self) -> AbstractContextManager[None]: ...

    def start_param_sync(self, *, force_sync: bool) -> None: ...


class Optimizer(Protocol):
    """Megatron's `MegatronOptimizer`, or several of them as one."""

    param_groups: Sequence[dict[str, Any]]

    def zero_grad(self) -> None: ...

    def step(self) -> tuple[bool, float | None, int | None]:
        """Whether the weights changed, the gradients' norm before clipping, and the number of zeros where counted."""

    def sharded_state_dict(
        self, model_sharded_state_dict: dict[str, Any], *, is_loading: bool, metadata: dict[str, Any]
    ) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class Scheduler(Protocol):
    """Megatron's `OptimizerParamScheduler`."""

    num_steps: int

    def step(self, increment: int) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...
