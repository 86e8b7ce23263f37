"""How libraries say that a device has no memory left.

torch says `OutOfMemoryError` of its own allocator alone. NCCL, cuBLAS, cuDNN and others allocate beside it, and what
they raise is a RuntimeError, which is told by its words.
"""

import re

_WORDS = re.compile(
    r"""
    out\ of\ memory                           # torch, the CUDA runtime, NCCL, Triton, Transformer Engine
    | CUDA_ERROR_OUT_OF_MEMORY | cudaErrorMemoryAllocation
    | Failed\ to\ CUDA\ (?:malloc|calloc)      # NCCL's own buffers; not `host alloc`
    | CU(?:BLAS|DNN|SPARSE|SOLVER)_STATUS_ALLOC_FAILED | CUFFT_ALLOC_FAILED
    | CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED
    """,
    re.VERBOSE | re.IGNORECASE,
)
_OF_THE_HOST = re.compile(r"DefaultCPUAllocator|Cannot allocate memory|host out of memory|cudaHostAlloc", re.IGNORECASE)


def out_of_memory_error(error: BaseException) -> RuntimeError | None:
    """Of an error and what it was raised from, the first that says that the device has no memory left."""
    if isinstance(error, RuntimeError):
        text = str(error)
        if _WORDS.search(text) and not _OF_THE_HOST.search(text):
            return error
    return None if error.__cause__ is None else out_of_memory_error(error.__cause__)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error, or what it was raised from, says that the device has no memory left, whoever asked for it."""
    return out_of_memory_error(error) is not None
