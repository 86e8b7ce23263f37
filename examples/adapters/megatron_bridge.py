"""Megatron-Bridge's own training loop on a recipe, with this engine behind Megatron's flags.

    NVTE_CPU_OFFLOAD_V1=1 torchrun --nproc-per-node 1 examples/adapters/megatron_bridge.py

Bridge asks for that variable and for Transformer Engine's layers wherever it offloads.
"""

from nemo_rl_offload import OffloadOptions
from nemo_rl_offload.adapters import megatron_core

if __name__ == "__main__":
    offload = megatron_core.install(OffloadOptions(host_memory_budget_bytes=32 << 30))

    from megatron.bridge.recipes.qwen.h100.qwen3 import qwen3_600m_pretrain_1gpu_h100_bf16_config as recipe
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    config = recipe()
    config.model.fine_grained_activation_offloading = True
    config.model.offload_modules = ["core_attn", "attn_proj"]
    pretrain(config, forward_step)
    print(offload.stats())
