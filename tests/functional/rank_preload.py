"""What every rank needs, imported once in the server that the ranks are forked from. Never imported by a test."""

from nemo_rl_offload.megatron.runtime.cpu import install_cpu_support

install_cpu_support()

import rank_work  # noqa: E402

from nemo_rl_offload.megatron.build.bridge import bridge  # noqa: E402

__all__ = ["rank_work"]
bridge()
