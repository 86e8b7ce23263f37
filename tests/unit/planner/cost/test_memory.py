import pytest
from jobs import SENSIBLE, make_job

from nemo_rl_offload.planner.cost.flops import layer_costs, recompute_ms
from nemo_rl_offload.planner.cost.memory import Optimizer, stage_parameters, state_bytes
from nemo_rl_offload.planner.cost.parameters import ParameterCount, model_parameters, mtp_parameters
from nemo_rl_offload.specs.catalogue import load_model_shape
from nemo_rl_offload.specs.devices import find_device
from nemo_rl_offload.specs.model_shape import DENSE_LAYER, MOE_LAYER
from nemo_rl_offload.specs.parallel_layout import ParallelLayout, stage_layers


@pytest.mark.parametrize("name", SENSIBLE)
def test_stages_hold_the_whole_model(name: str) -> None:
    shape = load_model_shape(name, None)
    ranks = min(4, shape.num_layers)
    first = shape.num_layers - 3 * (shape.num_layers // 4)
    layout = ParallelLayout(ranks, pipeline=ranks, num_layers_first=first)
    stages = stage_layers(layout, shape.num_layers)
    total = sum(stage_parameters(shape, layout, chunks, rank).total for rank, chunks in enumerate(stages))
    embedding = shape.vocab_size * shape.hidden_size
    twice = embedding * (shape.tied_embeddings + (shape.num_mtp_layers > 0))
    assert total == model_parameters(shape) + mtp_parameters(shape).total + twice
    one = ParallelLayout(1)
    alone = stage_parameters(shape, one, stage_layers(one, shape.num_layers)[0], 0).total
    assert alone == model_parameters(shape) + mtp_parameters(shape).total


def test_state_of_adam_in_bfloat16() -> None:
    parameters = ParameterCount(shared=1000, expert=600)
    layout = ParallelLayout(world=8, expert=4)
    found = state_bytes(parameters, layout, Optimizer(), 2)
    assert found == {"weights": 3200, "gradients": 6400, "optimizer": 1000 * 12 // 8 + 600 * 12 // 2}
    whole = state_bytes(parameters, layout, Optimizer(distributed=False), 2)
    assert whole["optimizer"] == 1600 * 12
    assert state_bytes(parameters, layout, Optimizer(share_on_host=1.0), 2)["optimizer"] == 0


def test_context_parallel_ranks_share_the_optimizer_too() -> None:
    found = state_bytes(ParameterCount(1200, 0), ParallelLayout(world=8, context=2, tensor=2), Optimizer(), 2)
    assert found["optimizer"] == 1200 * 12 // 4


@pytest.mark.parametrize(
    ("name", "active_parameters"),
    [
        ("deepseek-ai/DeepSeek-V3", 36.6e9),
        ("Qwen/Qwen3-8B", 8.19e9),
        ("Qwen/Qwen3-30B-A3B", 3.35e9),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B", 3.6e9),
    ],
)
def test_operations_are_two_per_active_parameter(name: str, active_parameters: float) -> None:
    """Published active parameters, less the embedding; DeepSeek's 36.6B and the others' include the output layer."""
    context = make_job(name, layout=ParallelLayout(8)).context
    shape = context.shape
    flops = sum(work.product_flops for kind in shape.layer_kinds for work in layer_costs(context, kind))
    flops /= context.tokens.count
    output = shape.vocab_size * shape.hidden_size
    embedding = 0 if name.startswith("deepseek") else output
    assert flops == pytest.approx(2 * (active_parameters - output - embedding), rel=0.02)


def test_attention_is_causal() -> None:
    """Two products of 4096 x 4096 per head, half of each masked: 2 x 2 x 4096^2 x 128 / 2 operations per head."""
    work = layer_costs(make_job("meta-llama/Llama-3.1-8B", layout=ParallelLayout(8)).context, DENSE_LAYER)
    attention = next(each for each in work if each.module == "core_attn")
    assert attention.attention_flops == 32 * 2 * 2 * 4096**2 * 128 / 2
    device = find_device("h100-80gb")
    assert attention.forward_ms(device, False) == pytest.approx(attention.attention_flops / (989e12 * 0.4) * 1e3)
    assert attention.backward_ms(device, False) == pytest.approx(2.5 * attention.forward_ms(device, False))


@pytest.mark.parametrize("name", ["layernorm", "moe_act", "mla_up_proj"])
def test_recomputation_takes_less_than_the_layer(name: str) -> None:
    job = make_job("deepseek-ai/DeepSeek-V3")
    layer_ms = sum(work.forward_ms(job.device, False) for work in layer_costs(job.context, MOE_LAYER))
    assert 0 < recompute_ms(job.context, name, job.device) < layer_ms / 5


def test_eight_bit_products_are_faster() -> None:
    device = find_device("h100-80gb")
    product = next(w for w in layer_costs(make_job("Qwen/Qwen3-8B").context, DENSE_LAYER) if w.module == "mlp_fc1")
    assert product.forward_ms(device, True) == pytest.approx(product.forward_ms(device, False) * 989 / 1979)
