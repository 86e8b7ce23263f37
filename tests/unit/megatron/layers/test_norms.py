"""Norms follow their formula, and their parameters what the configuration says."""

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.megatron.layers.norms import TorchNorm


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
