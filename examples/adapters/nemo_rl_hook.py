"""NeMo-RL's Megatron policy, with this engine in its workers: a hook that Ray runs when a worker's process starts.

NeMo-RL starts Ray itself. Hand it the hook by the job's environment, where this project is installed in the workers':

    ray job submit --runtime-env-json '{"worker_process_setup_hook": "nemo_rl_hook.install_offloading"}' -- \\
        python examples/run_grpo.py --config ...

`policy.megatron_cfg.fine_grained_activation_offloading` and `offload_modules` say what is offloaded.
"""

import importlib.util

from nemo_rl_offload import OffloadOptions
from nemo_rl_offload.adapters import megatron_core


def install_offloading() -> None:
    """In every worker that could train with Megatron; others (vLLM's, environments') are left alone."""
    if importlib.util.find_spec("megatron") is not None:
        megatron_core.install(OffloadOptions(host_memory_budget_bytes=32 << 30))
