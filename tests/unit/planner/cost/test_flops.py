"""Operations of a training step, beside the textbook's estimate."""

import pytest

from nemo_rl_offload.planner.cost.flops import training_flops
from nemo_rl_offload.planner.cost.parameters import model_parameters
from nemo_rl_offload.specs.catalogue import load_model_shape


@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-7B", "meta-llama/Llama-3.1-8B"])
def test_a_dense_model_takes_six_operations_a_weight_and_token(name: str) -> None:
    shape = load_model_shape(name, None)
    embedding = shape.vocab_size * shape.hidden_size
    weights = model_parameters(shape) - embedding  # looked up, not multiplied
    attention = 6 * shape.num_layers * shape.num_attention_heads * shape.head_dim * 1000  # causal: half of 12 L H Q T
    assert training_flops(shape, [1000]) / 1000 == pytest.approx(6 * weights + attention, rel=1e-3)


def test_sequences_add_up() -> None:
    shape = load_model_shape("Qwen/Qwen3-30B-A3B", None)
    both = training_flops(shape, [100, 300])
    assert both == pytest.approx(training_flops(shape, [100]) + training_flops(shape, [300]), rel=1e-12)
    assert both < training_flops(shape, [400]), "attention sees one longer sequence"
