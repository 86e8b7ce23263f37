"""Operations of a training step, beside the textbook's estimate."""

from dataclasses import replace

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


@pytest.mark.parametrize(("window", "length"), [(4, 3), (4, 4), (4, 50), (512, 1000)])
def test_a_window_counts_the_pairs_that_it_leaves(window: int, length: int) -> None:
    whole = load_model_shape("meta-llama/Llama-3.1-8B", None)
    cut = replace(whole, windows=(window, *whole.windows[1:]))
    pairs = sum(min(place + 1, window) - (place + 1) for place in range(length))  # fewer than the causal mask's
    of_pair = 3 * 4 * whole.num_attention_heads * whole.head_dim  # forward and backward, two products of 2 H Q each
    difference = training_flops(cut, [length]) - training_flops(whole, [length])
    # A sum over places is an integral here, as ever with causal masks: one pair in `length - window` beside.
    assert difference == pytest.approx(of_pair * pairs, rel=1 / max(1, length - window))


def test_layers_for_further_tokens_count_with_head_and_projection() -> None:
    shape = load_model_shape("deepseek-ai/DeepSeek-V3", None)
    without = replace(shape, num_mtp_layers=0)
    further = training_flops(shape, [1]) - training_flops(without, [1])
    longer = replace(without, num_layers=62, layers_with_experts=(*without.layers_with_experts, True))
    layer = training_flops(longer, [1]) - training_flops(without, [1])
    head = 6 * shape.hidden_size * shape.vocab_size
    assert further == pytest.approx(layer + head + 12 * shape.hidden_size**2, rel=1e-6)
