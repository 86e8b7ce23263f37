"""What the keys about saved activations mean together, for one policy and one model: offloaded, recomputed, stashed.

Several keys say one thing: a switch, a list and an engine; NeMo-RL's `activation_checkpointing` over Megatron-Core's
four keys of recomputation; `auto`, which stands for the modules that recomputation and the stash leave. They are
resolved here, once, and read downward as one object:

| who reads it | for what |
|---|---|
| `megatron/build/transformer_config.py` | Megatron's fields and view, boundaries of layers, parts of dense MLPs |
| `megatron/build/offload.py` | the `OffloadOptions` that the engine is built from |
| `planner/job.py` | the job whose memory and time are computed |
| `policy/offload_totals.py`, `cli/check.py` | what a run and `check` say about offloading |

What a key alone says (sizes, fractions, counts) goes from the configuration to its one reader, and is not repeated.

Two things are known late: the model (attention that is latent, layers with experts) and the layers that
`transformer_impl: auto` finds on a machine. `resolve_activations` takes them where they are known. Until then every
model counts as one with latent attention and experts, which leaves `auto` the fewest modules and refuses none.

What Megatron is told. Megatron-Core checks its own fields when a provider is finalized, and it knows less than this
project: its checks run on a *view* (`megatron_view`), and the values that layers read are put back after them
(`own_fields`).

| configured | Megatron's view |
|---|---|
| `transformer_impl: torch` | `local` |
| its experts' capacity and paged stash, which are this project's | none |
| offloading null | nothing: the provider's own values stay |
| modules that only this project offloads, `auto` | taken out; offloading is off when none remains |

Rejected: to write the meaning back into the configuration. What is printed, compared at resume and planned with has
to be what the user wrote. Rejected for the rules (`config/rules`): this object, which reads all keys. A rule ends
where a value that it needs is reported already, and one wrong key would silence rules about others; they share the
parts, `listed_modules` and `ResolvedRecompute`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_rl_offload.specs.offload_modules import (
    MEGATRON_MODULES,
    NATIVE_MODULES,
    STASHED_MODULES,
    TRANSFORMER_ENGINE_MODULES,
    discarded_by_recompute,
    fused_norms,
)
from nemo_rl_offload.specs.recompute import ResolvedRecompute


@dataclass(frozen=True)
class ResolvedActivations:
    """See the module's text; `resolve_activations` makes it."""

    switch: bool | None
    """True offloads; False clears what the model's own configuration says, None keeps it."""
    engine: str
    """Who moves the activations, while something does: native (this project's) or megatron."""
    is_auto: bool
    """Whether the engine chooses among `modules`, for a memory budget."""
    modules: tuple[str, ...]
    """The modules whose regions are open: those listed, or with `auto` all that can be chosen from; none when off."""
    recompute: ResolvedRecompute
    transformer_impl: str
    """torch or transformer_engine; auto as long as no machine was asked."""
    expert_capacity_factor: float | None
    """Rows of the experts' buffers, times the balanced case; None: as many as come."""
    has_latent_attention: bool = True
    has_experts: bool = True

    @property
    def offloads(self) -> bool:
        return bool(self.switch)

    @property
    def is_native(self) -> bool:
        return self.engine == "native"

    @property
    def listed_modules(self) -> tuple[str, ...]:
        """The modules that are offloaded whatever is measured; none with `auto`."""
        return () if self.is_auto else self.modules

    @property
    def known_to_megatron(self) -> list[str]:
        """The listed modules that Megatron-Core's own checks see."""
        return [name for name in self.listed_modules if name in MEGATRON_MODULES]

    @property
    def without_boundary(self) -> list[str]:
        """The listed modules that Transformer Engine's layers cannot offload, having fused them with others.

        `attn_norm` is a layer's input where whole layers are recomputed: our engine takes it from the checkpoint
        around the layer.
        """
        is_layers_input = self.is_native and self.recompute.granularity == "full"
        fused = fused_norms(self.has_latent_attention or is_layers_input, self.has_experts)
        return [name for name in self.listed_modules if name in fused or name not in TRANSFORMER_ENGINE_MODULES]

    @property
    def opens_dense_mlps(self) -> bool:
        """Whether Transformer Engine's dense MLPs need this project's class, for regions or for parts recomputed."""
        moves = self.offloads and self.is_native
        return self.transformer_impl != "torch" and (moves or self.recompute.has_dense_mlp_parts)

    @property
    def megatron_view(self) -> dict[str, object]:
        """Megatron's fields while it checks them."""
        view: dict[str, object] = {"transformer_impl": self.transformer_impl}
        if self.transformer_impl == "torch":
            view = {"transformer_impl": "local", "moe_paged_stash": False, "moe_expert_rank_capacity_factor": None}
        if self.switch is None:
            return view
        known = self.known_to_megatron
        return view | {"fine_grained_activation_offloading": bool(known), "offload_modules": known}

    @property
    def own_fields(self) -> dict[str, object]:
        """Megatron's fields as layers are to read them, where the view has other values.

        The stash is not put back: Megatron's schedules would start their own if told of `moe_paged_stash`.
        """
        fields: dict[str, object] = {}
        if self.switch is not None:
            fields = {"fine_grained_activation_offloading": self.switch, "offload_modules": list(self.modules)}
        if self.transformer_impl == "torch":
            fields["moe_expert_rank_capacity_factor"] = self.expert_capacity_factor
        return fields


def resolve_activations(
    megatron_cfg: Mapping[str, Any],
    transformer_impl: str | None = None,
    *,
    has_latent_attention: bool = True,
    has_experts: bool = True,
) -> ResolvedActivations:
    """Read a checked section `policy.megatron_cfg`; `transformer_impl` is what the machine makes of that key."""
    switch, listed = megatron_cfg["fine_grained_activation_offloading"], megatron_cfg["offload_modules"]
    recompute = ResolvedRecompute.resolve(megatron_cfg)
    is_auto = bool(switch) and listed == "auto"
    selectable = selectable_modules(recompute, megatron_cfg["moe_paged_stash"], has_latent_attention)
    return ResolvedActivations(
        switch=switch,
        engine=megatron_cfg["activation_offload"]["engine"],
        is_auto=is_auto,
        modules=selectable if is_auto else listed_modules(switch, listed),
        recompute=recompute,
        transformer_impl=transformer_impl or megatron_cfg["transformer_impl"],
        expert_capacity_factor=megatron_cfg["moe_expert_rank_capacity_factor"],
        has_latent_attention=has_latent_attention,
        has_experts=has_experts,
    )


def listed_modules(switch: bool | None, listed: Sequence[str] | None) -> tuple[str, ...]:
    """The modules that `offload_modules` lists; none while offloading is off or `auto`."""
    return tuple(listed) if switch and listed is not None and not isinstance(listed, str) else ()


def selectable_modules(
    recompute: ResolvedRecompute, has_paged_stash: bool, has_latent_attention: bool
) -> tuple[str, ...]:
    """The modules that `auto` chooses from: all but those whose tensors recomputation discards or the stash holds."""
    discarded = discarded_by_recompute(has_latent_attention)
    taken = {name for part in recompute.modules for name in discarded.get(part, ())}
    if has_paged_stash:
        taken.update(STASHED_MODULES)
    return tuple(name for name in NATIVE_MODULES if name not in taken)
