"""What an engine and its adapter are told, in bytes and numbers; and the engine that is made of it.

A configuration stays where it is read. Whoever has one (a policy, arguments of a call, another program's flags)
translates it into `OffloadOptions`, and every adapter builds its engine of those by `build_engine`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.offload.arena import HostArena
from nemo_rl_offload.offload.backends.base import Backend
from nemo_rl_offload.offload.engine import OffloadEngine
from nemo_rl_offload.offload.memory_budget import MemoryBudgetController, ReduceOverRanks
from nemo_rl_offload.offload.selection import Selection

_BYTES_OR_COUNTS = (
    *("host_memory_budget_bytes", "gpu_memory_budget_bytes", "min_tensor_bytes", "min_tensor_elements"),
    *("kept_bytes_per_step", "max_inflight_groups", "max_inflight_bytes"),
)


@dataclass(frozen=True, kw_only=True)
class OffloadOptions:
    """Figures are those of one rank.

    Raises:
        ConfigError: a size is no number of bytes, a fraction is none, or `modules` is neither a sequence nor "auto".
    """

    modules: Sequence[str] | Literal["auto"] = ()
    """Names that the adapter knows, whose saved tensors are offloaded; auto: what of all of them
    `gpu_memory_budget_bytes` asks for. `megatron_core.install` takes Megatron's `offload_modules` for none."""
    host_memory_budget_bytes: int
    """The most host memory taken; what does not fit stays on the device. `host_memory.host_memory_budget_bytes` makes
    it of "32GiB" or a share of the free memory."""
    gpu_memory_budget_bytes: int | None = None
    """Device memory for everything that is in the peak, weights too; with auto, and only then."""
    min_tensor_bytes: int = 1 << 20
    """A smaller tensor stays on the device."""
    min_tensor_elements: int = 0
    """The same in elements, as Megatron-Core counts."""
    fraction: float = 1.0
    """Share of a forward's groups of activations that is offloaded, the earliest."""
    kept_bytes_per_step: int = 0
    """So much of a step stays on the device, its first groups. Megatron-Core's `delta_offload_bytes_across_pp_ranks`
    times this rank's pipeline rank."""
    max_inflight_groups: int | None = None
    """Copies of a module on their way at a time; None: no limit."""
    max_inflight_bytes: int | None = None
    """Device memory that copies on their way may hold; None: the engine's own bound."""

    def __post_init__(self) -> None:
        if isinstance(self.modules, str) and self.modules != "auto":
            raise ConfigError(f"modules={self.modules!r}: give a list of names, like [{self.modules!r}], or 'auto'")
        if (self.modules == "auto") != (self.gpu_memory_budget_bytes is not None):
            raise ConfigError("modules='auto' and gpu_memory_budget_bytes need each other: give both or neither")
        for name in _BYTES_OR_COUNTS:
            value: object = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 0):
                raise ConfigError(f"{name}={value!r}: give a whole number from 0 on, like 32 << 30 for 32 GiB")
        if not 0 <= self.fraction <= 1:
            raise ConfigError(f"fraction={self.fraction!r}: give a share from 0 to 1")


def build_engine(
    options: OffloadOptions,
    backend: Backend,
    *,
    arena: HostArena | None = None,
    reduce_max_over_ranks: ReduceOverRanks | None = None,
    steps_are_told: bool = False,
) -> OffloadEngine:
    """Build the engine for `backend`'s device.

    Args:
        options: of them, `modules` is the adapter's: the engine takes what is in its regions.
        backend: how to copy.
        arena: host memory that others use too; None: the engine's own.
        reduce_max_over_ranks: with auto, the maximum of measurements over the ranks that must plan alike.
        steps_are_told: the adapter calls `end_step` after each step, from the first on.
    """
    auto = None
    if options.gpu_memory_budget_bytes is not None:
        auto = MemoryBudgetController(
            options.gpu_memory_budget_bytes, options.host_memory_budget_bytes, reduce_max_over_ranks
        )
    return OffloadEngine(
        backend,
        host_memory_budget_bytes=options.host_memory_budget_bytes,
        arena=arena,
        min_tensor_bytes=options.min_tensor_bytes,
        min_tensor_elements=options.min_tensor_elements,
        max_inflight_bytes=options.max_inflight_bytes,
        max_inflight_groups=options.max_inflight_groups,
        selection=Selection(fraction=options.fraction, kept_bytes_per_step=options.kept_bytes_per_step),
        auto=auto,
        steps_are_told=steps_are_told,
    )
