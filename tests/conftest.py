"""The property tests draw the same examples at every run; `HYPOTHESIS_PROFILE=default pytest` draws new ones."""

import os
from importlib.util import find_spec

from hypothesis import settings

os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 lets a worker wait for whatever else the machine does
settings.register_profile("repeatable", derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

if find_spec("transformer_engine"):  # before a test imports Megatron
    import torch

    from nemo_rl_offload.megatron.runtime.cpu import hide_transformer_engine

    if not torch.cuda.is_available():
        hide_transformer_engine()
