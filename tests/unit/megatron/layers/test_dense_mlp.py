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

from nemo_rl_offload.adapters.megatron_core.interface import use_engine
from nemo_rl_offload.megatron.layers.dense_mlp import FusedNormDenseMLP, open_dense_mlps, recompute_dense_mlps
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
        self.post_process = True


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


def outcome_and_moved_bytes(mlp: MLP) -> tuple[list[Tensor], dict[str, int]]:
    """With both modules of dense MLPs offloaded."""
    engine = OffloadEngine(HostBackend(), host_memory_budget_bytes=1 << 24, min_tensor_bytes=0)
    engine.exclude(mlp.parameters())
    use_engine(engine, ("mlp_fc1", "mlp_act"))
    try:
        got = outcome(mlp)
    finally:
        use_engine(None)
    moved = {module: stats.bytes_out for module, stats in engine.stats().per_module.items()}
    engine.close()
    return got, moved


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if "fused" in name else ()) for name in ACTIVATIONS]
)  # fused ones are compiled
def test_same_bits_as_megatrons(name: str) -> None:
    plain = make_mlp(name)
    opened = make_mlp(name)
    opened.load_state_dict(plain.state_dict())
    open_dense_mlps([Layer(opened)])
    assert type(opened) is FusedNormDenseMLP
    got, moved = outcome_and_moved_bytes(opened)
    assert all(map(torch.equal, got, outcome(plain)))
    assert all(moved[module] > 0 for module in ("mlp_fc1", "mlp_act"))


@pytest.mark.parametrize("recompute", ["mlp", "mlp_fc1", "mlp_act"])
def test_recomputation_changes_no_bit_and_offloads_what_is_left(recompute: str) -> None:
    plain, again = make_mlp("swiglu"), make_mlp("swiglu")
    again.load_state_dict(plain.state_dict())
    layer = Layer(again)
    recompute_dense_mlps(open_dense_mlps([layer]), [recompute], None)
    assert layer.recompute_mlp is (recompute == "mlp")
    got, moved = outcome_and_moved_bytes(again)
    assert all(map(torch.equal, got, outcome(plain)))
    hidden, width = 8 * 2 * 32 * 4, 8 * 2 * 64 * 4
    expected = {
        "mlp": {"mlp_fc1": hidden, "mlp_act": 3 * width},  # Megatron's layer has the checkpoint, not its MLP
        "mlp_fc1": {"mlp_fc1": hidden},
        "mlp_act": {"mlp_fc1": hidden, "mlp_act": 2 * width},
    }
    assert moved == expected[recompute]


@pytest.mark.parametrize(
    ("modules", "num_layers", "expected"),
    [
        (["mlp_fc1"], None, ["mlp_fc1"] * 3),
        (["mlp_fc1"], 2, [None, "mlp_fc1", "mlp_fc1"]),
        (["mlp_fc1"], 9, ["mlp_fc1"] * 3),
        (["mlp_act", "mlp_fc1"], 1, ["mlp_act", "mlp_act", "mlp_fc1"]),
        (["mlp_act", "mlp"], 1, ["mlp_act", "mlp_act", "mlp"]),
        (["mlp"], 2, [None, "mlp", "mlp"]),
        (["core_attn"], None, [None] * 3),
    ],
)
def test_the_last_layers_of_a_chunk_recompute_more(
    modules: list[str], num_layers: int | None, expected: list[str | None]
) -> None:
    with_experts, before_another = Chunk(ends_with_loss=True), Chunk(ends_with_loss=False)
    with_experts.append(Layer(nn.Identity()))
    recompute_dense_mlps(open_dense_mlps([with_experts, before_another]), modules, num_layers)
    assert with_experts.recomputed() == before_another.recomputed() == expected


@pytest.mark.parametrize(
    ("modules", "num_layers", "expected"),
    [
        (["mlp_fc1"], None, ["mlp_fc1"] * 3),
        (["mlp_act", "mlp_fc1"], 1, ["mlp_act", "mlp_fc1", "mlp_act"]),
        (["mlp"], 2, ["mlp", "mlp", None]),
        (["mlp"], 3, ["mlp"] * 3),
    ],
)
def test_the_layer_before_the_loss_is_the_last_to_recompute(
    modules: list[str], num_layers: int | None, expected: list[str | None]
) -> None:
    chunk = Chunk(ends_with_loss=True)
    recompute_dense_mlps(open_dense_mlps([chunk]), modules, num_layers)
    assert chunk.recomputed() == expected


class Chunk(nn.ModuleList):
    """Three dense layers."""

    def __init__(self, *, ends_with_loss: bool) -> None:
        super().__init__([Layer(make_mlp("gelu")) for _ in range(3)])
        self.post_process = ends_with_loss

    def recomputed(self) -> list[str | None]:
        dense = [layer for layer in self if isinstance(layer.mlp, MLP)]
        return ["mlp" if layer.recompute_mlp else layer.mlp.recompute for layer in dense]


def test_other_mlps_stay_as_they_are() -> None:
    class Other(MLP):  # type: ignore[misc]
        forward: Callable[..., Any]

    other = make_mlp("gelu")
    other.__class__ = Other
    open_dense_mlps([Layer(other)])
    assert type(other) is Other
