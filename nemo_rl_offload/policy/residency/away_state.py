"""What training alone needs leaves the device while an engine beside it generates, as far as that needs the room.

A colocated engine takes a share of the device while training waits. Gradients are freed then (they are worth nothing
between two steps), and where that is not enough, the optimizer's state and main weights go to host memory, and after
them the weights: the largest first, and last what the next handing over of weights reads. They come back when training
has its turn, with the same bits. Where the room is there nothing moves, so it costs no time.

Rejected: to move everything in every step, as others do: two crossings of the link for memory that nobody asked for.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.megatron.build.model import MegatronModel
from nemo_rl_offload.offload.arena import HostArena
from nemo_rl_offload.offload.waiting_weights import AwayTensors
from nemo_rl_offload.policy.residency.gradients import free_gradients
from nemo_rl_offload.policy.residency.kept_weights import BUDGET_KEY, lasting_tensors
from nemo_rl_offload.units import MIB, gib

MARGIN_BYTES = 256 * MIB
"""Beyond what is asked for: what allocators round up."""


def free_device_bytes() -> int | None:
    """What nobody uses of the current GPU; None without one."""
    if not torch.cuda.is_available():
        return None
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


class AwayState:
    """A model's optimizer and weights, as far as they are away."""

    def __init__(self, arena: HostArena, model: MegatronModel) -> None:
        self._arena, self._model = arena, model
        self._optimizer, self._weights = AwayTensors(arena), AwayTensors(arena)

    @property
    def num_bytes(self) -> int:
        """Host memory that was taken for them, and is kept."""
        return self._optimizer.num_bytes + self._weights.num_bytes

    def make_room(self, num_bytes: int, *, keeps_weights: bool = False) -> bool:
        """Let them leave until so many bytes of the device are free; returns whether any are away.

        With `keeps_weights` no more than the optimizer leaves.

        Raises ConfigError where the host's budget has no room for them.
        """
        parts: Sequence[tuple[AwayTensors, Callable[[], list[Tensor]]]] = (
            (self._optimizer, self._optimizer_tensors),
            (self._weights, self._weight_tensors),
        )
        if self._lacks(num_bytes):
            free_gradients(self._model)
        for part, tensors in parts[:1] if keeps_weights else parts:
            if not part.are_away and self._lacks(num_bytes):
                self._leave(part, tensors())
        return any(part.are_away for part, _ in parts)

    def bring_weights(self) -> None:
        """The weights come back."""
        self._weights.come_back()

    def bring_all(self) -> None:
        """All comes back."""
        self._weights.come_back()
        self._optimizer.come_back()

    def _lacks(self, num_bytes: int) -> bool:
        free_bytes = free_device_bytes()
        return free_bytes is not None and free_bytes < num_bytes + MARGIN_BYTES

    def _leave(self, part: AwayTensors, tensors: Sequence[Tensor]) -> None:
        try:
            part.leave(tensors)
        except MemoryError as error:
            raise ConfigError(
                f"{BUDGET_KEY}: {gib(self._arena.budget_bytes, 2)} per rank, {gib(self._arena.held_bytes)} of it taken,"
                f" has no room for what leaves the GPU while vLLM generates: {error}. Raise it, or lower "
                "policy.generation.vllm_cfg.gpu_memory_utilization."
            ) from error

    def _weight_tensors(self) -> list[Tensor]:
        return [each for each in lasting_tensors(self._model.modules) if self._is_on_device(each)]

    def _optimizer_tensors(self) -> list[Tensor]:
        if self._model.optimizer is None:
            return []
        of_model = {each.untyped_storage().data_ptr() for each in lasting_tensors(self._model.modules)}
        chained = getattr(self._model.optimizer, "chained_optimizers", [self._model.optimizer])
        optimizers = [each.optimizer for each in chained if each.optimizer is not None]
        main_weights = [weight for each in optimizers for group in each.param_groups for weight in group["params"]]
        state = [value for each in optimizers for values in each.state.values() for value in values.values()]
        return [
            each
            for each in (*main_weights, *state)
            if isinstance(each, Tensor)
            and self._is_on_device(each)
            and each.untyped_storage().data_ptr() not in of_model
        ]

    def _is_on_device(self, tensor: Tensor) -> bool:
        return tensor.device.type == self._arena.backend.device.type and tensor.numel() > 0
