"""What training alone needs leaves the device while an engine beside it generates, as far as that needs the room.

The optimizer's part may also be sent away while log-probabilities are computed, whatever room there is.

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
from nemo_rl_offload.policy.residency.eight_bits import free_copies
from nemo_rl_offload.policy.residency.gradients import free_gradients
from nemo_rl_offload.policy.residency.kept_weights import BUDGET_KEY
from nemo_rl_offload.policy.residency.model_tensors import optimizer_tensors, weight_tensors
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
        parts: Sequence[tuple[AwayTensors, Callable[[MegatronModel, HostArena], list[Tensor]]]] = (
            (self._optimizer, optimizer_tensors),
            (self._weights, weight_tensors),
        )
        if self._lacks(num_bytes):
            free_gradients(self._model)
            free_copies(self._model.modules)
        for part, tensors in parts[:1] if keeps_weights else parts:
            if not part.are_away and self._lacks(num_bytes):
                self._leave(part, tensors(self._model, self._arena))
        return any(part.are_away for part, _ in parts)

    def bring_weights(self) -> None:
        """The weights come back."""
        self._weights.come_back()

    def bring_all(self) -> None:
        """All comes back."""
        self._weights.come_back()
        self._optimizer.come_back()

    def _lacks(self, num_bytes: int) -> bool:
        free_bytes = free_device_bytes() if num_bytes else None
        return free_bytes is not None and free_bytes < num_bytes + MARGIN_BYTES

    def _leave(self, part: AwayTensors, tensors: Sequence[Tensor]) -> None:
        try:
            part.leave(tensors)
        except MemoryError as error:
            raise ConfigError(
                f"{BUDGET_KEY}: {gib(self._arena.budget_bytes, 2)} per rank, {gib(self._arena.held_bytes)} of it taken,"
                f" has no room for what leaves the GPU between two trainings: {error}. Raise it, lower "
                "policy.generation.vllm_cfg.gpu_memory_utilization, or leave out policy.offload_optimizer_for_logprob."
            ) from error
