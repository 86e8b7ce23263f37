"""Megatron-LM's `pretrain_gpt.py`, and any other program of Megatron-Core's, with this engine behind its own flags.

Start it in the place of that script, with its arguments:

    torchrun --nproc-per-node 8 examples/adapters/megatron_lm.py pretrain_gpt.py \\
        --fine-grained-activation-offloading --offload-modules core_attn mlp_norm ...
"""

import runpy
import sys

from nemo_rl_offload import OffloadOptions
from nemo_rl_offload.adapters import megatron_core

if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    offload = megatron_core.install(OffloadOptions(host_memory_budget_bytes=32 << 30))
    runpy.run_path(sys.argv[0], run_name="__main__")
    print(offload.stats())
