"""Which linears get an adapter, what is wrong with targets, and how large adapters are."""

from dataclasses import replace

import pytest

from nemo_rl_offload.planner.cost.memory import stage_adapters, state_bytes
from nemo_rl_offload.planner.cost.parameters import ParameterCount
from nemo_rl_offload.planner.job import Optimizer
from nemo_rl_offload.specs.catalogue import find_config, load_model_shape
from nemo_rl_offload.specs.lora import Adapters, adapted, is_named, target_problems
from nemo_rl_offload.specs.model_shape import ModelShape, parse_model_shape
from nemo_rl_offload.specs.parallel_layout import ParallelLayout, stage_layers

DENSE, EXPERTS, LATENT = "Qwen/Qwen2.5-7B", "Qwen/Qwen3-30B-A3B", "deepseek-ai/DeepSeek-V3"
TIED = "Qwen/Qwen2.5-1.5B"
ALL = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
EACH = ("linear_q", "linear_k", "linear_v", "linear_proj", "linear_fc1_gate", "linear_fc1_up", "linear_fc2")


def shape(name: str = DENSE) -> ModelShape:
    return load_model_shape(name, None)


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [
        ("linear_qkv", True),
        ("*.linear_qkv", True),
        ("*.layers.3.*.linear_qkv", True),
        ("decoder.layers.3.self_attention.linear_qkv", True),
        ("*linear_q*", True),
        ("*", True),
        ("linear_q", False),
        ("linear_*", False),
        ("*.layers.1.*.linear_qkv", False),
        ("decoder.layers.3.self_attention", False),
        ("decoderXlayers.3.*", False),
        ("*.layers.3?*", False),
    ],
)
def test_patterns_are_those_of_bridge(pattern: str, matches: bool) -> None:
    assert is_named("decoder.layers.3.self_attention.linear_qkv", pattern) is matches


def test_targets_choose_linears_and_their_parts() -> None:
    found = adapted(shape(), ("linear_v", "linear_q", "*.layers.27.*.linear_fc1"), ())
    assert [one.linear.layer for one in found] == [*range(28), 27]
    assert {one.parts for one in found} == {("linear_q", "linear_v"), ()}
    assert len(adapted(shape(), (), ("output_layer", "linear_fc2"))) == 3 * 28
    experts = adapted(shape(EXPERTS), (), ("output_layer",))
    assert {one.linear.name for one in experts} == {"linear_qkv", "linear_proj"}, "none of the experts', as in Bridge"
    assert len(adapted(shape(LATENT), ("linear_proj",), ())) == 62, "with the layer that predicts a further token"
    for targets in ((), ("*",), ("*linear_qkv", "output*")):
        (head,) = [one for one in adapted(shape(), targets, ()) if one.linear.name == "output_layer"]
        assert head == (("output_layer", 3584, (152064,), False, False, 28), ())
    assert adapted(shape(LATENT), ("output_layer",), ())[0].linear.layer == 62


@pytest.mark.parametrize(
    ("model", "targets", "excluded", "key", "words"),
    [
        (DENSE, ("linear_qvk",), (), "target_modules", "linear_qvk matches nothing in the model. Did you mean 'linear_qkv'?"),  # noqa: E501
        (DENSE, ("linear_qkv", "o_proj"), (), "target_modules", "Megatron-Core's name of it is linear_proj."),
        (DENSE, ("*.mlp.up_proj",), (), "target_modules", "Megatron-Core's name of it is linear_fc1_up."),
        (DENSE, ("*.layers.28.*.linear_proj",), (), "target_modules", "matches nothing"),
        (DENSE, ("linear_qkv", "linear_q"), (), "target_modules", "as linear_q and linear_qkv. Name one"),
        (DENSE, ("lm_head",), (), "target_modules", "Megatron-Core's name of it is output_layer."),
        (TIED, ("linear_proj", "output_layer"), (), "target_modules", "output_layer asks for LoRA of a tied output layer"),  # noqa: E501
        (TIED, ("*",), (), "target_modules", "* asks for LoRA of a tied output layer"),
        (TIED, (), (), "target_modules", "Name the modules, or add output_layer to exclude_modules"),
        (TIED, (), ("linear_proj",), "target_modules", "an empty list, which means all, asks for LoRA of a tied"),
        (DENSE, (), ("output_layer", *ALL), "exclude_modules", "leaves no linear"),
        (DENSE, ("linear_qkv",), ("linear_proj",), "exclude_modules", "Empty one of the two"),
        (EXPERTS, ("linear_fc1_gate",), (), "target_modules", "experts have one adapter for linear_fc1"),
        (LATENT, ("linear_qkv",), (), "target_modules", "matches nothing"),
        (LATENT, ("linear_kv_up_proj",), (), "target_modules", "linear_kv_up_proj gets no adapter here"),
        (LATENT, (), ("output_layer",), "target_modules", "an empty list means linear_q_proj"),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_named(
    model: str, targets: tuple[str, ...], excluded: tuple[str, ...], key: str, words: str
) -> None:
    ((found, message),) = target_problems(shape(model), targets, excluded)
    assert found == key
    assert words in message


@pytest.mark.parametrize(
    ("model", "targets", "excluded"),
    [
        (DENSE, ALL, ()),
        (DENSE, EACH, ()),
        (DENSE, ("linear_q", "linear_v"), ()),
        (DENSE, ("*.layers.0.*.linear_qkv", "*.layers.1.*.linear_q"), ()),
        (DENSE, (), ()),
        (DENSE, (*EACH, "output_layer"), ()),
        (TIED, (), ("output_layer",)),
        (TIED, ("*.linear_*",), ()),
        (LATENT, ("linear_proj", "output_layer"), ()),
        (EXPERTS, ALL, ()),
        (EXPERTS, (), ("*output*",)),
        (LATENT, ("linear_proj", "linear_fc1"), ()),
    ],
)
def test_what_can_be_honoured_passes(model: str, targets: tuple[str, ...], excluded: tuple[str, ...]) -> None:
    assert list(target_problems(shape(model), targets, excluded)) == []


def test_sizes_are_those_of_two_matrices() -> None:
    def count(targets: tuple[str, ...], model: ModelShape, **layout: int) -> ParameterCount:
        ranks = ParallelLayout(**layout)
        chunks = stage_layers(ranks, model.num_layers)
        counts = [
            stage_adapters(model, ranks, chunks[rank], rank, Adapters(targets, (), 16)) for rank in range(len(chunks))
        ]
        return sum(counts[1:], counts[0])

    dense = replace(shape(), num_layers=4, layers_with_experts=(False,) * 4)
    h, heads, groups, ffn = 3584, 28 * 128, 4 * 128, 18944
    fused = (h + heads + 2 * groups) + (heads + h) + (h + 2 * ffn) + (ffn + h)
    assert count(ALL, dense) == ParameterCount(4 * 16 * fused, 0)
    assert count(EACH, dense) == ParameterCount(4 * 16 * (fused + 2 * h + h), 0), "with an A for each part"
    assert count(("linear_q", "linear_v"), dense).shared == 4 * 16 * (2 * h + heads + groups)
    of_head = 16 * (h + 152064)
    assert count((*ALL, "output_layer"), dense).shared == 4 * 16 * fused + of_head
    assert count(("output_layer",), dense, world=2, tensor=2).shared * 2 == of_head
    ends = ParallelLayout(world=2, pipeline=2, stages="Ettt|tL")
    chunks = stage_layers(ends, dense.num_layers)
    held = [stage_adapters(dense, ends, chunks[rank], rank, Adapters(("output_layer",), (), 16)) for rank in (0, 1)]
    assert held == [ParameterCount(0, 0), ParameterCount(of_head, 0)]
    assert count(ALL, dense, world=2, pipeline=2) == count(ALL, dense)
    assert count(ALL, dense, world=2, tensor=2).shared * 2 == count(ALL, dense).shared
    of_experts = count(("linear_fc2",), shape(EXPERTS), world=8, expert=8)
    assert of_experts == ParameterCount(0, 48 * 16 * (768 + 2048)), "all experts of a layer share one"


def test_linears_of_a_hybrid_model_are_those_of_its_layers() -> None:
    content = find_config("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B")
    assert content is not None
    hybrid = parse_model_shape(content).shape
    found = {one.linear.name: one.linear for one in adapted(hybrid, ("*",), ()) if one.linear.layer < 6}
    h, inner, groups, state = 2688, 64 * 64, 8, 128
    assert found["in_proj"][1:3] == (h, (2 * inner + 2 * groups * state + 64,))
    assert found["out_proj"][1:4] == (inner, (h,), True)
    layers = [one.linear.layer for one in adapted(hybrid, ("in_proj", "linear_q", "linear_fc2"), ())]
    assert layers[:9] == [0, 1, 1, 2, 3, 3, 4, 5, 6], "experts and shared experts, and attention in the sixth layer"
    (shared,) = [one.linear for one in adapted(hybrid, ("*.shared_experts.linear_fc1",), ()) if one.linear.layer == 1]
    assert shared.outputs == (3712,)
    own = Adapters(("*.experts.linear_fc1",), (), 16, experts_share=False)
    layout = ParallelLayout(world=8, expert=8)
    counted = stage_adapters(hybrid, layout, stage_layers(layout, hybrid.num_layers)[0], 0, own)
    assert counted == ParameterCount(0, 23 * 16 * 16 * (h + 1856)), "16 of 128 experts, an adapter each"


def test_frozen_weights_have_neither_gradients_nor_state() -> None:
    layout, weights, adapters = ParallelLayout(), ParameterCount(1000, 0), ParameterCount(10, 2)
    found = state_bytes(weights, layout, Optimizer(), 2, adapters)
    assert found == {"weights": 2 * 1012, "gradients": 4 * 12, "optimizer": 12 * 12}
