"""The libraries behind Megatron-Core's flex dispatcher, which brings tokens to their experts."""

_DEEP_EP = "Build it on the machines that train (https://github.com/deepseek-ai/DeepEP"
FLEX_LIBRARIES = {
    "deepep": ("deep_ep", f"{_DEEP_EP})"),
    "hybridep": ("deep_ep", f"{_DEEP_EP}, branch hybrid-ep)"),
    "ncclep": ("transformer_engine", "Build Transformer Engine with NVTE_BUILD_WITH_NCCL_EP=1"),
}
"""Values of `moe_flex_dispatcher_backend`: the package that is imported, and how to get it."""
