"""A stack of Megatron's MoE layers in plain torch, alone in a process, for the stash's bench and its device tests."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from nemo_rl_offload.megatron.runtime.cpu import install_cpu_support


@dataclass(frozen=True)
class StackShape:
    """Layers of experts alone, and their input."""

    num_layers: int
    hidden_size: int
    ffn_size: int
    num_experts: int
    top_k: int
    num_tokens: int
    dtype: str
    shared_ffn_size: int | None = None


@contextmanager
def one_rank() -> Iterator[None]:
    """Megatron's process groups of this process alone."""
    install_cpu_support()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from nemo_rl_offload.megatron.runtime.rendezvous import join_alone

    join_alone("nccl" if torch.cuda.is_available() else "gloo")
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


class ExpertLayers(nn.Module):
    """x + experts(norm(x)), `num_layers` times; [tokens, 1, hidden] in and out.

    `capacity_factor` None: Megatron's own dispatcher, whose buffers have as many rows as come. The layers' guard is
    what `megatron.build.paged_stash.install_paged_stash` gives; None then. `modules` are offloaded, `stash` says how
    to page.
    """

    def __init__(
        self, shape: StackShape, capacity_factor: float | None, *, modules: Sequence[str] = (), **stash: float | None
    ) -> None:
        super().__init__()
        from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

        from nemo_rl_offload.megatron.build.model import forget_probabilities
        from nemo_rl_offload.megatron.build.paged_stash import install_paged_stash
        from nemo_rl_offload.megatron.layers.torch_backend import torch_block_spec

        config = _config(shape, capacity_factor)
        config.fine_grained_activation_offloading, config.offload_modules = bool(modules), list(modules)
        groups = get_default_pg_collection()
        specs = torch_block_spec(config).layer_specs
        self.config = config
        self.norms = nn.ModuleList(spec.submodules.pre_mlp_layernorm(config, shape.hidden_size) for spec in specs)
        self.experts = nn.ModuleList(
            spec.submodules.mlp(config=config, pg_collection=groups, is_mtp_layer=False, name=None) for spec in specs
        )
        for number, layer in enumerate(self.experts):
            layer.set_layer_number(number + 1)  # type: ignore[operator]
            # A kept graph keeps autograd's accumulators, which belong to the stream of their first use: no capture.
            layer.register_forward_hook(forget_probabilities, always_call=True)
        if torch.cuda.is_available():
            self.cuda()
        keys = {
            "moe_expert_rank_capacity_factor": capacity_factor,
            "moe_paged_stash": bool(stash),
            "moe_paged_stash_page_size": stash.get("page_size", 64),
            "moe_paged_stash_buffer_size_factor_cuda": stash.get("factor_cuda", 1.1),
            "moe_paged_stash_buffer_size_factor_cpu": stash.get("factor_cpu", 0.0),
        }
        policy: Any = {"megatron_cfg": keys}
        self.guard = install_paged_stash(policy, [self])

    def forward(self, x: Tensor) -> Tensor:
        norm: nn.Module
        experts: nn.Module
        for norm, experts in zip(self.norms, self.experts, strict=True):
            x = x + experts(norm(x))[0]
        return x


def _config(shape: StackShape, capacity_factor: float | None) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    dtype = getattr(torch, shape.dtype)
    config = TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=1,
        num_moe_experts=shape.num_experts,
        moe_router_topk=shape.top_k,
        moe_ffn_hidden_size=shape.ffn_size,
        moe_shared_expert_intermediate_size=shape.shared_ffn_size,
        moe_grouped_gemm=True,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="allgather",
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        bias_activation_fusion=False,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=not torch.cuda.is_available(),
    )
    config.moe_expert_rank_capacity_factor = capacity_factor  # Megatron's checks want its own dispatcher for it
    return config


def make_input(shape: StackShape) -> Tensor:
    """A random input that wants a gradient."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(shape.num_tokens, 1, shape.hidden_size, device=device, generator=generator)
    return x.to(getattr(torch, shape.dtype)).requires_grad_()
