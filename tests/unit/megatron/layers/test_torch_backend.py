"""The layer specification, and the dense MLP that it builds."""

import pytest
import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_config import TransformerConfig

from nemo_rl_offload.megatron.layers.dense_mlp import DenseMLP
from nemo_rl_offload.megatron.layers.norms import TorchLayerNormColumnParallelLinear
from nemo_rl_offload.megatron.layers.torch_backend import TorchSpecProvider, torch_block_spec


def make_config(**changes: object) -> TransformerConfig:
    shape = {"num_layers": 4, "hidden_size": 16, "num_attention_heads": 4, "use_cpu_initialization": True}
    return TransformerConfig(**{**shape, **changes})


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_mlp_is_megatrons_mlp_bit_by_bit(gated: bool, bias: bool) -> None:
    config = make_config(
        gated_linear_unit=gated,
        activation_func=F.silu if gated else F.gelu,
        add_bias_linear=bias,
        bias_activation_fusion=False,
        normalization="RMSNorm",
    )
    submodules = get_mlp_module_spec_for_backend(TorchSpecProvider()).keywords["submodules"]
    results = []
    for kind in (MLP, DenseMLP):
        torch.manual_seed(0)
        mlp = kind(config, submodules, ffn_hidden_size=config.ffn_hidden_size)
        for parameter in mlp.parameters():
            torch.nn.init.normal_(parameter)
        x = torch.randn(5, 2, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()
        output, output_bias = mlp(x)
        output.square().sum().backward()
        results.append([output, output_bias, x.grad, *(parameter.grad for parameter in mlp.parameters())])
    assert len(results[0]) == len(results[1])
    for left, right in zip(*results, strict=True):
        assert left is right is None or torch.equal(left, right)
    assert isinstance(mlp.linear_fc1, TorchLayerNormColumnParallelLinear)


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(
    ("frequency", "expected"),
    [(1, [True] * 4), (2, [True, False] * 2), ([0, 1, 1, 0], [False, True, True, False]), (None, [False] * 4)],
)
def test_layers_have_experts_where_the_frequency_says(frequency: object, expected: list[bool]) -> None:
    config = make_config(normalization="RMSNorm", add_bias_linear=False)
    config.num_moe_experts = None if frequency is None else 4
    config.moe_layer_freq = frequency
    spec = torch_block_spec(config)
    dense = [getattr(layer.submodules.mlp, "func", None) == DenseMLP.as_mlp_submodule for layer in spec.layer_specs]
    assert [not each for each in dense] == expected
