"""Shared experts with a region, which Megatron cannot offload."""

from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from torch import Tensor

from nemo_rl_offload.adapters.megatron_core.interface import offload_region


class TorchSharedExpertMLP(SharedExpertMLP):  # type: ignore[misc]
    """Megatron's shared experts as the region `shared_experts`; [sequence, batch, hidden] in and out.

    Where they overlap the dispatcher (`moe_shared_expert_overlap`), Megatron calls their parts one by one on a stream
    of their own, and there is no region.
    """

    def forward(self, hidden_states: Tensor) -> Tensor:
        region = offload_region(self.config, hidden_states, "shared_experts", self.training)
        with region as hidden_states:
            output = super().forward(hidden_states)
        return region.group_offload(output)  # type: ignore[no-any-return]
