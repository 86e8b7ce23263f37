"""What is recomputed: NeMo-RL's switch `activation_checkpointing` together with Megatron-Core's own keys."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self, TypedDict

from nemo_rl_offload.specs.offload_modules import DENSE_MLP_RECOMPUTE, EXPERT_RECOMPUTE


class RecomputeKeys(TypedDict, total=False):
    """Values of Megatron-Core's keys."""

    recompute_granularity: str | None
    recompute_modules: list[str] | None
    recompute_method: str | None
    recompute_num_layers: int | None


RECOMPUTE_KEYS = tuple(RecomputeKeys.__annotations__)


@dataclass(frozen=True)
class ResolvedRecompute:
    """The values in force."""

    granularity: str | None = None
    """full: whole layers; selective: `modules`; None: nothing."""
    listed_modules: tuple[str, ...] | None = None
    """As given, in force or not; None leaves Megatron's default."""
    method: str | None = None
    """With full: uniform or block."""
    num_layers: int | None = None
    """Full: layers in a uniform group, or the first ones. Selective: layers with `mlp` or `mlp_fc1`; None: all."""

    @classmethod
    def resolve(cls, megatron_cfg: Mapping[str, Any]) -> Self:
        """Read `activation_checkpointing` and `RECOMPUTE_KEYS`.

        As in NeMo-RL, true fills in what Megatron-Core must be told, one layer at a time, and false turns everything
        off.
        """
        switch, modules = megatron_cfg["activation_checkpointing"], megatron_cfg["recompute_modules"]
        if switch is False:
            return cls()
        given = cls(
            megatron_cfg["recompute_granularity"],
            None if modules is None else tuple(modules),
            megatron_cfg["recompute_method"],
            megatron_cfg["recompute_num_layers"],
        )
        if switch is None:
            return given
        if given.granularity == "selective":
            return given
        num_layers = 1 if given.num_layers is None else given.num_layers
        return replace(given, granularity="full", method=given.method or "uniform", num_layers=num_layers)

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules that selective recomputation covers; none without it."""
        if self.granularity != "selective":
            return ()
        return ("core_attn",) if self.listed_modules is None else self.listed_modules

    @property
    def has_dense_mlp_parts(self) -> bool:
        """Whether parts of dense MLPs are recomputed, which this project does itself."""
        return not set(self.modules).isdisjoint(DENSE_MLP_RECOMPUTE)

    @property
    def keys(self) -> RecomputeKeys:
        """The values under the configuration's keys."""
        return {
            "recompute_granularity": self.granularity,
            "recompute_modules": None if self.listed_modules is None else list(self.listed_modules),
            "recompute_method": self.method,
            "recompute_num_layers": self.num_layers,
        }

    def keys_for_megatron(self, *, has_experts: bool) -> RecomputeKeys:
        """The same without what only this project does: parts of dense MLPs, and a number of layers for modules.

        And without experts' parts in a model that has none, which Megatron refuses beside Transformer Engine's layers.
        """
        if self.granularity != "selective" or self.listed_modules is None:
            return self.keys
        left_out = DENSE_MLP_RECOMPUTE if has_experts else (*DENSE_MLP_RECOMPUTE, *EXPERT_RECOMPUTE)
        known = tuple(name for name in self.listed_modules if name not in left_out)
        return replace(self, listed_modules=known, num_layers=None).keys
