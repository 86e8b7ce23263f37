"""What a `config.json` says, computed without torch, beside transformers' own numbers."""

import json
from typing import Any

import pytest
import torch

from nemo_rl_offload.specs.model_families import refusals
from nemo_rl_offload.specs.model_keys import rotation_factor

LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
BESIDE = "original_max_position_embeddings"
POSITIONS: list[dict[str, Any]] = [
    {},
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0},
    {"rope_type": "yarn", "factor": 1.0},
    {"rope_type": "yarn", "factor": 0.5},
    {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.0},
    {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.7},
    {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    {"rope_type": "yarn", "factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.5},
    {"rope_type": "yarn", "factor": 40.0, "mscale": 0.7, "mscale_all_dim": 0.0},
    LONG,
    {**LONG, "factor": 8.0},
    {**LONG, "attention_factor": 1.25},
    {**LONG, "original_max_position_embeddings": 64},
]


SHAPE = {"hidden_size": 32, "num_attention_heads": 4, "head_dim": 8, "max_position_embeddings": 64}


def by_transformers(content: dict[str, Any]) -> float:
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = AutoConfig.for_model(**json.loads(json.dumps(content)))
    kind = config.rope_parameters["rope_type"]
    return 1.0 if kind == "default" else float(ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))[1])


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_the_factor_of_rotations_is_transformers(positions: dict[str, Any], family: str) -> None:
    section = {"rope_theta": 10000.0, "original_max_position_embeddings": 32, **positions}
    content = {"model_type": family, **SHAPE, **({"rope_parameters": section} if positions else {})}
    assert refusals(content) == []
    assert rotation_factor(content) == pytest.approx(by_transformers(content), rel=1e-12)


@pytest.mark.parametrize(
    "change",
    [
        {"rope_scaling": LONG, "original_max_position_embeddings": 16},
        {"rope_scaling": LONG, "original_max_position_embeddings": 128},
        {"rope_scaling": {**LONG, "original_max_position_embeddings": 8}, "original_max_position_embeddings": 32},
        {"rope_scaling": LONG},
        {"rope_scaling": {**LONG, "factor": 0}},
        {"rope_scaling": {"type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 16},
        {"model_type": "gpt_oss"},
        {"model_type": "gpt_oss", "rope_parameters": None},
        {"model_type": "gpt_oss", "rope_scaling": {"rope_type": "default"}},
    ],
)
def test_it_is_so_wherever_the_original_length_stands(change: dict[str, Any]) -> None:
    content = {"model_type": "qwen2", **SHAPE, "rope_theta": 10000.0, **change}
    assert refusals(content) == []
    assert rotation_factor(content) == pytest.approx(by_transformers(content), rel=1e-12)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rope_scaling": {**LONG, "original_max_position_embeddings": 256}, BESIDE: 64}, "of more than 64 tokens"),
        ({"rope_scaling": LONG}, "of more than 64 tokens"),
        ({"rope_scaling": LONG, BESIDE: 128}, ""),
        ({"rope_scaling": LONG, "max_position_embeddings": None}, "is not in config.json, and rope_type longrope"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": None}, "depends on it"),
        ({"rope_scaling": {**LONG, "original_max_position_embeddings": 1}}, "a number above 1"),
        ({"rope_scaling": LONG, BESIDE: None}, "null of config.json is not taken with rope_type longrope"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, BESIDE: None}, "not taken with rope_type yarn"),
        ({"rope_scaling": {**LONG, "original_max_position_embeddings": 128.0}}, ""),
        ({"rope_scaling": LONG, BESIDE: "long"}, "original_max_position_embeddings 'long' of config.json is not taken"),
        ({BESIDE: None}, ""),
    ],
)
def test_the_length_from_which_positions_turn_otherwise_is_transformers(change: dict[str, Any], words: str) -> None:
    """A length beside the section was passed over, and longer sequences were trained with other positions."""
    content = {"model_type": "qwen2", **SHAPE, "rope_theta": 10000.0, **change}
    content = {key: value for key, value in content.items() if value is not None or key == BESIDE}
    problems = refusals(content, 96)
    assert [words in problem for problem in problems] == ([True] if words else [])
