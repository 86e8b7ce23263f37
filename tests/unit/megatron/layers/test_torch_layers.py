"""Norms, the dense MLP and the layer specification."""

import pytest
import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_config import TransformerConfig

from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.megatron.layers.dense_mlp import DenseMLP
from nemo_rl_offload.megatron.layers.torch_backend import TorchSpecProvider, torch_block_spec
from nemo_rl_offload.megatron.layers.torch_layers import TorchLayerNormColumnParallelLinear, TorchNorm


def make_config(**changes: object) -> TransformerConfig:
    shape = {"num_layers": 4, "hidden_size": 16, "num_attention_heads": 4, "use_cpu_initialization": True}
    return TransformerConfig(**{**shape, **changes})


@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("zero_centered", [False, True])
def test_norms_follow_their_formula(normalization: str, zero_centered: bool) -> None:
    config = make_config(normalization=normalization, layernorm_zero_centered_gamma=zero_centered)
    norm = TorchNorm(config, 16, eps=1e-3)
    x = torch.randn(3, 2, 16, dtype=torch.float64) * 0.1
    plain = x - x.mean(-1, keepdim=True) if normalization == "LayerNorm" else x
    plain = plain / (plain.square().mean(-1, keepdim=True) + 1e-3).sqrt()
    # As built, either kind multiplies by one.
    torch.testing.assert_close(norm.double()(x), plain)
    torch.nn.init.normal_(norm.weight)
    expected = plain * (norm.weight + zero_centered)
    if normalization == "LayerNorm":
        torch.nn.init.normal_(norm.bias)
        expected = expected + norm.bias
    torch.testing.assert_close(norm(x), expected)
    assert (norm.bias is None) == (normalization == "RMSNorm")


def test_unknown_norm_is_refused() -> None:
    config = make_config()
    config.normalization = "BatchNorm"
    with pytest.raises(ConfigError, match="no normalization 'BatchNorm'"):
        TorchNorm(config, 16)


@pytest.mark.parametrize("parallel", [False, True])
def test_norm_parameters_know_of_sequence_parallelism(parallel: bool) -> None:
    config = make_config(normalization="LayerNorm")
    config.sequence_parallel = parallel
    norm = TorchNorm(config, 16)
    assert norm.weight.sequence_parallel == norm.bias.sequence_parallel == parallel


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
