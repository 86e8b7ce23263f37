from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs import SENSIBLE

from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.specs.catalogue import load_model_shape
from nemo_rl_offload.specs.parallel_layout import (
    ParallelLayout,
    check_layout,
    counted_layers,
    divisions,
    stage_layers,
    width_multiple,
)

QWEN = load_model_shape("Qwen/Qwen2.5-7B", None)
MOE = load_model_shape("Qwen/Qwen3-30B-A3B", None)


@pytest.mark.parametrize(
    ("sizes", "recipe", "expected"),
    [
        ((1, 1), None, 1),
        ((2, 3), None, 12),
        ((1, 1), "tensorwise", 16),
        ((2, 1), "tensorwise", 32),
        ((1, 2), "tensorwise", 32),
        ((2, 2), "blockwise", 512),
        ((1, 1), "mxfp8", 32),
    ],
)
def test_what_divides_the_width_of_microbatches(sizes: tuple[int, int], recipe: str | None, expected: int) -> None:
    assert width_multiple(*sizes, recipe) == expected


@given(st.integers(1, 40), st.integers(1, 8), st.integers(1, 3), st.none() | st.integers(1, 9), st.none() | st.just(2))
@settings(max_examples=200, deadline=None)
def test_a_checked_layout_gives_every_layer_to_one_stage(
    num_layers: int, ranks: int, virtual: int, first: int | None, last: int | None
) -> None:
    shape = replace(QWEN, num_layers=num_layers)
    if ranks == 1:
        first = last = None
    layout = ParallelLayout(ranks, pipeline=ranks, virtual=virtual, num_layers_first=first, num_layers_last=last)
    try:
        check_layout(layout, shape, 128)
    except ConfigError:
        return
    stages = stage_layers(layout, num_layers)
    assert len(stages) == ranks
    assert {len(chunks) for chunks in stages} == {virtual}
    by_position = [stages[rank][chunk] for chunk in range(virtual) for rank in range(ranks)]
    assert [layer for chunk in by_position for layer in chunk] == list(range(num_layers))
    assert all(len(chunk) for chunk in by_position)
    assert first is None or sum(map(len, stages[0])) == first
    assert last is None or sum(map(len, stages[-1])) == last


def test_61_layers_by_stages_that_are_written_down() -> None:
    shape = replace(load_model_shape("deepseek-ai/DeepSeek-V3", None), num_mtp_layers=0)
    text = "E|" + "|".join(["tt"] * 29) + "|ttt|L"
    layout = ParallelLayout(256, pipeline=8, virtual=4, expert=32, stages=text)
    check_layout(layout, shape, 4096)
    stages = stage_layers(layout, 61)
    assert stages[0] == [range(0), range(14, 16), range(30, 32), range(46, 48)]
    assert stages[7] == [range(12, 14), range(28, 30), range(44, 46), range(61, 61)]
    assert sorted(layer for chunks in stages for chunk in chunks for layer in chunk) == list(range(61))
    with pytest.raises(ConfigError, match="pipeline_model_parallel_layout: has 32 stages"):
        check_layout(replace(layout, virtual=2), shape, 4096)


@pytest.mark.parametrize("name", SENSIBLE)
def test_sensible_layouts_are_accepted(name: str) -> None:
    check_layout(SENSIBLE[name], load_model_shape(name, None), 4096)


REFUSED = [
    (
        QWEN,
        ParallelLayout(8, tensor=8),
        "tensor_model_parallel_size: 8 does not divide the attention heads 28. The nearest",
    ),
    (QWEN, ParallelLayout(7, tensor=7), "tensor_model_parallel_size: 7 and the 4 key heads do not divide"),
    (QWEN, ParallelLayout(8, tensor=3), "3 does not divide the attention heads 28. The nearest that does is 2."),
    (QWEN, ParallelLayout(8, sequence_parallel=True), "sequence_parallel: needs tensor_model_parallel_size above 1"),
    (QWEN, ParallelLayout(6, tensor=4), "4 ranks do not divide the 6 devices"),
    (QWEN, ParallelLayout(8, expert=2), "expert_model_parallel_size: the model has no experts. Set it to 1."),
    (
        QWEN,
        ParallelLayout(8, virtual=2),
        "virtual_pipeline_model_parallel_size: needs pipeline_model_parallel_size above 1",
    ),
    (
        QWEN,
        ParallelLayout(5, pipeline=5),
        "28 layers cannot be divided among 5 ranks. With policy.megatron_cfg.num_layers_in_first_pipeline_stage=4 the "
        "others take 6 each; as even as can be: "
        "'policy.megatron_cfg.pipeline_model_parallel_layout=\"Et*5|(t*6|)*3t*5L\"'",
    ),
    (QWEN, ParallelLayout(4, pipeline=4, virtual=3), "28 layers cannot be divided among 4 ranks with 3 chunks each."),
    (QWEN, ParallelLayout(3, context=3), "context_parallel_size: twice it must divide the sequence of 4096 tokens"),
    (
        MOE,
        ParallelLayout(48, expert=48),
        "expert_model_parallel_size: 48 does not divide the 128 experts. The nearest that",
    ),
    (MOE, ParallelLayout(8, expert=16), "16 ranks do not divide the 8 devices"),
    (
        MOE,
        ParallelLayout(5, expert_tensor=5),
        "expert_tensor_parallel_size: 5 does not divide the experts' width 768. The nearest that does is 4.",
    ),
    (QWEN, ParallelLayout(8, expert_tensor=2), "expert_tensor_parallel_size: the model has no experts. Set it to 1."),
    (
        replace(MOE, mlp_bias=True),
        ParallelLayout(8, expert_tensor=2),
        "expert_tensor_parallel_size: 2 ranks cannot share the model's experts, which have biases: Bias in Moe is only",
    ),
    (MOE, ParallelLayout(8, tensor=2), "sequence_parallel: experts with tensor parallelism need it. Set it to true."),
]


@pytest.mark.parametrize(("shape", "layout", "words"), REFUSED, ids=[words[:40] for _, _, words in REFUSED])
def test_an_impossible_layout_is_told_the_fix(shape: object, layout: ParallelLayout, words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        check_layout(layout, shape, 4096)  # type: ignore[arg-type]
    assert words in str(raised.value)
    assert all(line.startswith("policy.megatron_cfg.") for line in str(raised.value).splitlines())


@given(st.integers(1, 70), st.integers(2, 17), st.integers(1, 4), st.integers(0, 2))
@settings(max_examples=200, deadline=None)
def test_layers_are_divided_among_any_ranks_that_they_are_enough_for(
    num_layers: int, ranks: int, virtual: int, num_mtp: int
) -> None:
    found = divisions(num_layers, ranks, virtual, num_mtp)
    assert bool(found) is (num_layers >= ranks * virtual)
    for division in found:
        shape = replace(QWEN, num_layers=num_layers, num_mtp_layers=num_mtp)
        layout = ParallelLayout(ranks, pipeline=ranks, virtual=virtual, **division._asdict())
        check_layout(layout, shape, 4096)
        sizes = [sum(map(len, stage)) for stage in stage_layers(layout, num_layers)]
        share = -(-num_layers // (ranks * virtual)) * virtual
        assert max(sizes) <= share, "no rank has more than it must"
        if division.stages:
            assert max(sizes) - min(sizes) <= virtual


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as raised:
        check_layout(ParallelLayout(8, tensor=3, expert=2, virtual=2), QWEN, 4096)
    assert len(str(raised.value).splitlines()) >= 4


@given(st.lists(st.booleans(), min_size=1, max_size=12), st.none() | st.integers(1, 14), st.booleans())
def test_counted_layers_are_the_last_dense_ones_but_for_that_before_the_loss(
    is_dense: list[bool], number: int | None, ends_with_loss: bool
) -> None:
    found = counted_layers(is_dense, number, ends_with_loss)
    assert all(is_dense[position] for position in found)
    num_dense = sum(is_dense)
    assert len(found) == (num_dense if number is None else min(number, num_dense))
    spared = {position for position, each in enumerate(is_dense) if each} - found
    behind = {position for position in spared if position > min(found, default=0)}
    is_last_spared = 0 < len(found) < num_dense and ends_with_loss and is_dense[-1]
    assert behind == ({len(is_dense) - 1} if is_last_spared else set())


@pytest.mark.parametrize(
    ("name", "layout", "said"),
    [
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B", {"tensor": 16}, "the model's 8 groups of heads in Mamba-2 layers"),
        ("Qwen/Qwen3.5-35B-A3B", {"tensor": 4}, "the model's 2 key heads of attention, whose output has a gate"),
        ("Qwen/Qwen3.5-35B-A3B", {"tensor": 2, "context": 32}, "32 does not divide the 16 heads in gated delta nets"),
    ],
)
def test_heads_of_recurrent_layers_divide(name: str, layout: dict[str, int], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_layout(ParallelLayout(64, sequence_parallel=True, **layout), load_model_shape(name, None), 4096)
