"""Plans of models with Mamba-2 layers or gated delta nets."""

from dataclasses import replace

import pytest
from jobs import make_job

from nemo_rl_offload.planner.cost.activations import forward_bytes, fused_layer, generation_bytes, with_recomputation
from nemo_rl_offload.planner.cost.flops import layer_costs, training_flops
from nemo_rl_offload.planner.cost.messages import messages_ms
from nemo_rl_offload.planner.cost.recurrent import core_bytes, kept_bytes, mixer_of, recurrent_flops
from nemo_rl_offload.planner.cost.storages import LayerContext, Tokens
from nemo_rl_offload.planner.job import Recompute
from nemo_rl_offload.planner.plan import make_plan
from nemo_rl_offload.planner.search.choice import ways
from nemo_rl_offload.planner.search.to_config import Trials, offloaded_bytes
from nemo_rl_offload.planner.simulate.stages import build_stages
from nemo_rl_offload.specs.model_shape import LayerKind
from nemo_rl_offload.specs.parallel_layout import ParallelLayout
from nemo_rl_offload.units import GIB

NANO = "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B"
"""64 heads of 64 in 8 groups, states of 128, chunks of 128; hidden 2688."""
QWEN = "Qwen/Qwen3.5-35B-A3B"
"""16 heads of keys and 32 of values, of 128 each."""
MAMBA, DELTA = LayerKind("mamba", None), LayerKind("delta_net", "experts")


def context_of(name: str, sequence: int = 4096, **layout: int | bool) -> LayerContext:
    made = ParallelLayout(**{"world": 8, **layout})  # type: ignore[arg-type]
    return replace(make_job(name).context, layout=made, tokens=Tokens(sequence // made.context, sequence))


def test_most_of_a_mamba_layer_is_its_recurrence() -> None:
    """Per token: two products of a chunk's 128 tokens for 64 heads, eight forms of what is mixed, states and others."""
    context = context_of(NANO)
    per_token = core_bytes(context, MAMBA) / 4096
    squares, forms = 2 * 128 * 64 * 4, 8 * 64 * 64 * 4
    states = 2 * 64 * 64 * 128 * 4 / 128
    assert squares + forms + states < per_token < 1.5 * (squares + forms + states)
    kept = with_recomputation(fused_layer(context, MAMBA), {"core_attn"})
    live = sum(each.num_bytes for each in kept if each.live)
    hidden, projected, mixed = 2 * 4096 * 2688, 4096 * (2 * 4096 + 2 * 1024 + 64), 4096 * 4096
    assert live == 2 * (hidden + projected + mixed), "the norm's input and output, both projections' inputs"


def test_a_chunk_is_no_longer_than_its_sequence() -> None:
    assert mixer_of(context_of(NANO, 96), MAMBA).chunk == 96
    assert mixer_of(context_of(NANO, 200), MAMBA).padded == 256
    assert mixer_of(context_of(QWEN, 4096), DELTA).chunk == 64


@pytest.mark.parametrize("layout", [{"tensor": 2, "sequence_parallel": True}, {"context": 2}])
def test_ranks_share_the_heads(layout: dict[str, int | bool]) -> None:
    for name, kind in ((NANO, MAMBA), (QWEN, DELTA)):
        whole, part = core_bytes(context_of(name), kind), core_bytes(context_of(name, **layout), kind)
        assert part == pytest.approx(whole / 2, rel=1e-3)


def test_states_do_not_grow_with_the_sequence() -> None:
    """Float32 states, and the three inputs before the next that the convolution reads."""
    kept = 64 * 64 * 128 * 4 + 3 * (64 * 64 + 2 * 8 * 128) * 2
    assert kept_bytes(context_of(NANO, 4096), MAMBA) == kept_bytes(context_of(NANO, 1024), MAMBA) == kept
    shape = context_of(NANO).shape
    found = generation_bytes(context_of(NANO), shape.layer_kinds)
    assert found == {"keys and values": 6 * 4096 * 2 * 2 * 128 * 2, "states": 23 * kept}
    assert "states" not in generation_bytes(context_of("Qwen/Qwen3-8B"), context_of("Qwen/Qwen3-8B").shape.layer_kinds)


def test_operations_of_a_recurrence() -> None:
    """Of Mamba-2 in chunks, per token: c b^T, its product with x, and two products with a state."""
    flops = recurrent_flops(context_of(NANO), MAMBA) / 4096
    convolution = 2 * 4 * (64 * 64 + 2 * 8 * 128)
    assert flops == convolution + 2 * 128 * (8 * 128 + 64 * 64) + 4 * 64 * 64 * 128
    shape = context_of(NANO).shape
    step = training_flops(shape, [1])
    token = replace(context_of(NANO), layout=ParallelLayout(), tokens=Tokens(1, 1))
    products = sum(each.product_flops for kind in shape.layer_kinds for each in layer_costs(token, kind))
    products += 2 * shape.hidden_size * shape.vocab_size
    of_states = 23 * (4 * 64 * 64 * 128 + 2 * (8 * 128 + 64 * 64) + convolution)
    assert step - 3 * (products + of_states) == pytest.approx(3 * 6 * 32 * 2 * 128)


def test_layers_of_one_half_have_its_modules_alone() -> None:
    job = make_job(NANO, layout=ParallelLayout(8, expert=8))
    (stage,) = build_stages(job, ())
    modules: dict[int, list[str]] = {}
    for part in stage.chunks[0]:
        modules.setdefault(part.layer, []).append(part.module)
    mixing = ["attn_norm", "qkv_linear", "core_attn", "attn_proj"]
    experts = ["mlp_norm", "router", "shared_experts", "expert_fc1", "moe_act", "expert_fc2"]
    assert modules[0] == modules[5] == mixing
    assert modules[1] == experts
    saved = sum(sum(each.num_bytes for each in fused_layer(job.context, kind)) for kind in job.shape.layer_kinds)
    only = sum(
        each.num_bytes for kind in job.shape.layer_kinds for each in fused_layer(job.context, kind) if each.only_with
    )
    end = 2 * job.context.hidden_bytes
    assert sum(part.kept_bytes for part in stage.chunks[0]) == saved - only + end


def test_recomputing_the_recurrence_is_tried_of_such_models_alone() -> None:
    for name, is_tried in ((NANO, True), (QWEN, True), ("Qwen/Qwen3-8B", False)):
        tried = [way.recompute.modules for way in ways(make_job(name))]
        assert (frozenset({"core_attn"}) in tried) == is_tried


@pytest.mark.slow
def test_a_plan_recomputes_the_recurrence_where_memory_is_short() -> None:
    job = make_job("nvidia/NVIDIA-Nemotron-Nano-9B-v2", layout=ParallelLayout(8), memory_bytes=78 * GIB)
    plan = make_plan(job)
    assert plan.shortfall_bytes == 0
    assert "core_attn" in plan.chosen_job.recompute.modules or plan.chosen_job.recompute.method == "uniform"
    recomputing = make_plan(replace(job, recompute=Recompute(frozenset({"core_attn"}))))
    freed = plan.baseline.peak_bytes(0) - recomputing.baseline.peak_bytes(0)
    layers = sum(kind.mixer == "mamba" for kind in job.shape.layer_kinds)
    assert freed > 0.9 * (layers - 2) * core_bytes(job.context, MAMBA)


def test_messages_of_a_recurrence_do_not_grow_with_its_ranks() -> None:
    """Positions are exchanged for heads, where attention has the keys of all others."""
    found = [messages_ms(make_job(NANO, layout=ParallelLayout(8, context=each))) for each in (1, 2, 4)]
    assert found[0] < found[1]
    assert forward_bytes(context_of(NANO), MAMBA) > core_bytes(context_of(NANO), MAMBA)


def test_a_module_that_another_one_needs_is_not_left_out_for_moving_nothing() -> None:
    """attn_proj is offloaded beside core_attn alone, of which a recomputed recurrence leaves nothing: tries end."""
    job = make_job("nvidia/NVIDIA-Nemotron-Nano-9B-v2", layout=ParallelLayout(8))
    job = replace(job, shape=replace(job.shape, num_layers=4, hybrid_layers="M-M-", layers_with_experts=(False,) * 4))
    trials = Trials(job)
    found = trials.try_modules(Recompute(frozenset({"core_attn"})), ("core_attn", "attn_proj"))
    assert "core_attn" not in offloaded_bytes(found.step)
    assert found not in list(trials.try_less(found))
