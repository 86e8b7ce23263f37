"""What Megatron's selective recomputation saves, so that offloading it frees memory.

`CheckpointWithoutOutput` saves its inputs as detached leaves that require gradients. Autograd keeps the accumulator of
a saved leaf's gradient, and that keeps the leaf: a copy on the host frees nothing. Here the inputs are saved as they
came, with the graph behind them. The recomputation detaches what it reads, so that values and gradients are the same.

Rejected: to empty the storage of the inputs by force, as Megatron's engine does by `forced_released_tensors`. Whoever
else saved a tensor on that storage would read nothing. Limit: an input that is a leaf itself stays on the device.
"""

from typing import Any

from megatron.core.tensor_parallel import random as megatron_random

_MEGATRONS: Any = megatron_random.CheckpointWithoutOutputFunction


class _WithInputs(_MEGATRONS):  # type: ignore[misc]  # Megatron has no types
    @staticmethod
    def forward(ctx: Any, run_function: Any, checkpoint: Any, *args: Any) -> Any:
        outputs = _MEGATRONS.forward(ctx, run_function, checkpoint, *args)
        ctx.save_for_backward(*args)  # in place of Megatron's
        return outputs


def save_inputs(active: bool) -> None:
    """Whether recomputation saves its inputs this way in this process."""
    megatron_random.CheckpointWithoutOutputFunction = _WithInputs if active else _MEGATRONS
