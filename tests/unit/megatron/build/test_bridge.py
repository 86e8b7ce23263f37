"""Bridge imports without Transformer Engine, and nobody is led to believe that it is there."""

import importlib.util
import sys

import pytest

from nemo_rl_offload.megatron.build.bridge import bridge, have_transformer_engine
from nemo_rl_offload.megatron.layers.norms import TorchLayerNormColumnParallelLinear, TorchNorm
from nemo_rl_offload.megatron.layers.torch_experts import (
    TorchColumnParallelGroupedLinear,
    TorchRowParallelGroupedLinear,
)

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is not None, reason="Transformer Engine is installed"
)


@pytest.mark.slow
def test_no_empty_transformer_engine_is_left() -> None:
    assert bridge().AutoBridge is not None
    present = [name for name, module in sys.modules.items() if module is not None]
    assert not [name for name in present if name.split(".")[0].startswith("transformer_engine")]
    assert importlib.util.find_spec("transformer_engine") is None
    assert importlib.util.find_spec("transformer_engine_torch") is None
    assert not have_transformer_engine()


def test_megatron_core_knows_that_it_is_absent() -> None:
    bridge()
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.optimizer import distrib_optimizer

    assert not gpt_layer_specs.HAVE_TE
    assert not distrib_optimizer.HAVE_APEX_OR_TE


@pytest.mark.parametrize(
    ("layer", "parameter", "parallelism"),
    [
        (TorchLayerNormColumnParallelLinear, "weight", "column"),
        (TorchLayerNormColumnParallelLinear, "layer_norm_weight", "replicated"),
        (TorchColumnParallelGroupedLinear, "weight0", "column"),
        (TorchRowParallelGroupedLinear, "weight0", "row"),
        (TorchNorm, "weight", "replicated"),
    ],
)
def test_our_layers_are_known_to_bridge(layer: type, parameter: str, parallelism: str) -> None:
    bridge()
    from megatron.bridge.models.conversion.param_mapping import AutoMapping

    mapping = AutoMapping(megatron_param=f"decoder.{parameter}", hf_param="any")
    assert mapping._detect_parallelism_type(layer.__new__(layer)) == parallelism
