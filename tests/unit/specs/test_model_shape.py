"""One reader of `config.json`: the planner needs every number, rules ask any model a little."""

from dataclasses import replace
from typing import Any

import pytest
from transformers import AutoConfig

from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.specs.catalogue import CATALOGUE, find_config
from nemo_rl_offload.specs.model_shape import _FAMILIES, LayerKind, ModelShape, parse_model_shape, read_model_shape

DEEPSEEK = CATALOGUE["deepseek-ai/DeepSeek-V3"]


def test_what_the_planner_takes_is_what_rules_read() -> None:
    for name, content in CATALOGUE.items():
        parsed = parse_model_shape(content)
        assert parsed.problems == ()
        assert parsed.shape == read_model_shape(content, name)


def test_a_family_that_the_planner_does_not_know_has_a_shape_for_rules() -> None:
    content = {**DEEPSEEK, "model_type": "deepseek_v9", "max_position_embeddings": 4096}
    parsed = parse_model_shape(content)
    assert parsed.shape.has_latent_attention
    assert parsed.shape.has_shared_experts
    assert parsed.shape.predicts_further_tokens
    assert parsed.shape.layers_with_experts == (False,) * 3 + (True,) * 58
    assert parsed.shape.max_positions == 4096
    (problem,) = parsed.problems
    assert problem.startswith("model_type 'deepseek_v9' is not known. Known: llama, ")
    with pytest.raises(ConfigError, match=r"^mine: model_type 'deepseek_v9' is not known"):
        read_model_shape(content, "mine")


def test_layers_are_of_the_kinds_that_a_hybrid_model_says() -> None:
    content = find_config("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B")
    assert content is not None
    shape = read_model_shape({**content, "hybrid_override_pattern": "ME*-"}, "mine")
    experts, mlp = LayerKind(None, "experts"), LayerKind(None, "dense")
    assert shape.layer_kinds == (LayerKind("mamba", None), experts, LayerKind("attention", None), mlp)
    assert shape.mtp_kinds == (LayerKind("attention", None), experts)
    assert shape.all_kinds == (*shape.layer_kinds, *shape.mtp_kinds)
    without = read_model_shape({**content, "num_nextn_predict_layers": 0}, "mine")
    assert without.all_kinds == without.layer_kinds


@pytest.mark.parametrize(
    ("keys", "delta"),
    [
        ({}, (0, 1, 2, 4, 5, 6)),
        ({"full_attention_interval": 2}, (0, 2, 4, 6)),
        ({"layer_types": ["full_attention", *["linear_attention"] * 7]}, (1, 2, 3, 4, 5, 6, 7)),
    ],
)
def test_layers_are_gated_delta_nets_as_transformers_says(keys: dict[str, object], delta: tuple[int, ...]) -> None:
    content = find_config("Qwen/Qwen3.5-35B-A3B")
    assert content is not None
    shape = read_model_shape({**content, "num_hidden_layers": 8, **keys}, "mine")
    kinds = {layer: kind.mixer for layer, kind in enumerate(shape.layer_kinds)}
    assert tuple(layer for layer, mixer in kinds.items() if mixer == "delta_net") == delta
    assert {kind.mlp for kind in shape.layer_kinds} == {"experts"}


@pytest.mark.parametrize("wrong", [None, "8", 0, -1, True, 2.5, []])
@pytest.mark.parametrize(
    ("key", "field", "value"),
    [
        ("num_hidden_layers", "num_layers", 1),
        ("num_attention_heads", "num_attention_heads", 1),
        ("vocab_size", "vocab_size", 0),
    ],
)
def test_what_cannot_be_read_says_nothing_to_rules(key: str, field: str, value: int, wrong: Any) -> None:
    parsed = parse_model_shape({**DEEPSEEK, key: wrong})
    assert getattr(parsed.shape, field) == value
    assert [problem.split()[0] for problem in parsed.problems] == [key]


@pytest.mark.parametrize(
    ("key", "field", "value"),
    [
        ("num_key_value_heads", "num_key_value_heads", 32),
        ("num_nextn_predict_layers", "predicts_further_tokens", False),
        ("first_k_dense_replace", "has_experts", False),
        ("mlp_only_layers", "has_experts", False),
    ],
)
def test_what_is_not_a_number_counts_as_not_given(key: str, field: str, value: int) -> None:
    parsed = parse_model_shape({**CATALOGUE["Qwen/Qwen3-8B"], key: "many"})
    assert getattr(parsed.shape, field) == value
    assert [problem.split()[0] for problem in parsed.problems] == [key]


def test_an_empty_file_has_the_least_shape() -> None:
    parsed = parse_model_shape({})
    shape = parsed.shape
    assert shape.layers_with_experts == (False,)
    assert not shape.has_experts
    assert not shape.has_states
    assert (shape.vocab_size, shape.max_positions, shape.activation) == (0, 0, "silu")
    assert parsed.problems[0].startswith("model_type None is not known")


def test_the_keys_that_were_asked_for() -> None:
    for content in CATALOGUE.values():
        assert content.keys() <= parse_model_shape(content).honoured_keys
    honoured = parse_model_shape({**CATALOGUE["Qwen/Qwen3-8B"], "q_lora_rank": 8, "sliding_window": 4}).honoured_keys
    assert "head_dim" in honoured
    assert not {"sliding_window", "q_lora_rank"} & honoured, "queries are compressed in latent attention alone"


@pytest.mark.parametrize(("num_parts", "rows"), [(1, 151936), (2, 75968), (3, 50646), (64, 2374), (10**6, 1)])
def test_rows_of_the_vocabulary_on_a_rank(num_parts: int, rows: int) -> None:
    shape = parse_model_shape(CATALOGUE["Qwen/Qwen3-8B"]).shape
    assert shape.vocabulary_rows(num_parts) == rows
    assert 0 <= rows * num_parts - shape.vocab_size < num_parts


SIZES: list[dict[str, int]] = [
    {},
    {"hidden_size": 1024, "num_attention_heads": 16},
    {"hidden_size": 1536, "num_attention_heads": 12, "num_key_value_heads": 4},
]


@pytest.mark.parametrize("sizes", SIZES, ids=len)
@pytest.mark.parametrize("family", _FAMILIES)
def test_what_is_absent_is_what_transformers_takes(family: str, sizes: dict[str, int]) -> None:
    """A model without `first_k_dense_replace` was planned as one of other layers, 36 % too large."""

    def shape_of(content: dict[str, Any]) -> ModelShape | None:
        parsed = parse_model_shape(content)
        # no size depends on how many tokens a model was trained for, nor, with latent attention, on `head_dim`
        return None if parsed.problems else replace(parsed.shape, max_positions=0, head_dim=parsed.shape.query_head_dim)

    experts = {"num_experts_per_tok": 2} if family == "deepseek_v2" else {}  # whose class has none
    whole = AutoConfig.for_model(family, **sizes, **experts).to_dict()
    assert shape_of(whole) is not None
    asked = parse_model_shape(whole).honoured_keys & whole.keys() - {"model_type", *sizes, *experts}
    for absent in ([key] for key in sorted(asked)):
        less = {key: value for key, value in whole.items() if key not in absent}
        if (found := shape_of(less)) is not None:
            assert found == shape_of(AutoConfig.for_model(**less).to_dict()), absent
