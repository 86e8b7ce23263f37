"""The dense MLP with regions computes what Megatron's does, and hands its saved tensors to the engine."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from nemo_rl_offload.megatron.dense_mlp import FusedNormDenseMLP, open_dense_mlps
from nemo_rl_offload.megatron.offload_interface import use_engine
from nemo_rl_offload.offload import HostBackend, OffloadEngine

pytestmark = pytest.mark.usefixtures("process_group")

GATED = {"gated_linear_unit": True, "add_bias_linear": False}
ACTIVATIONS: dict[str, dict[str, Any]] = {
    "swiglu": {**GATED, "activation_func": F.silu},
    "fused_swiglu": {**GATED, "activation_func": F.silu, "bias_activation_fusion": True},
    "fused_swiglu_with_bias": {"gated_linear_unit": True, "activation_func": F.silu, "bias_activation_fusion": True},
    "clamped": {**GATED, "activation_func": F.silu, "activation_func_clamp_value": 0.5, "glu_linear_offset": 1.0},
    "gelu": {"activation_func": F.gelu},
    "fused_gelu": {"activation_func": F.gelu, "bias_activation_fusion": True},
    "fused_geglu": {**GATED, "activation_func": F.gelu, "bias_activation_fusion": True},
}


class Layer(TransformerLayer):  # type: ignore[misc]
    """As far as `open_dense_mlps` looks at one."""

    def __init__(self, mlp: nn.Module) -> None:
        nn.Module.__init__(self)
        self.mlp = mlp


def make_mlp(name: str) -> MLP:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=32,
        ffn_hidden_size=64,
        num_attention_heads=4,
        use_cpu_initialization=True,
        fine_grained_activation_offloading=False,
        **ACTIVATIONS[name],
    )
    config.fine_grained_activation_offloading = True
    config.offload_modules = ["mlp_fc1", "mlp_act"]
    torch.manual_seed(0)
    linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    return MLP(config, linears, ffn_hidden_size=64).train()


def outcome(mlp: MLP) -> list[Tensor]:
    x = torch.randn(8, 2, 32, generator=torch.Generator().manual_seed(1), requires_grad=True)
    output, bias = mlp(x * 1)
    (output if bias is None else output + bias).square().sum().backward()
    return [output.detach(), *(tensor.grad for tensor in (x, *mlp.parameters()) if tensor.grad is not None)]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if "fused" in name else ()) for name in ACTIVATIONS]
)  # fused ones are compiled
def test_same_bits_as_megatrons(name: str) -> None:
    plain = make_mlp(name)
    opened = make_mlp(name)
    opened.load_state_dict(plain.state_dict())
    open_dense_mlps([Layer(opened)])
    assert type(opened) is FusedNormDenseMLP
    engine = OffloadEngine(HostBackend(), host_memory_budget_bytes=1 << 24, min_tensor_bytes=0)
    engine.exclude(opened.parameters())
    use_engine(engine, ("mlp_fc1", "mlp_act"))
    try:
        got = outcome(opened)
    finally:
        use_engine(None)
    assert all(map(torch.equal, got, outcome(plain)))
    moved = engine.stats().per_module
    assert all(moved[module].bytes_out > 0 for module in ("mlp_fc1", "mlp_act"))
    engine.close()


def test_other_mlps_stay_as_they_are() -> None:
    class Other(MLP):  # type: ignore[misc]
        forward: Callable[..., Any]

    other = make_mlp("gelu")
    other.__class__ = Other
    open_dense_mlps([Layer(other)])
    assert type(other) is Other
