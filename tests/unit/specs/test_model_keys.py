"""What a `config.json` says, computed without torch, beside transformers' own numbers."""

from typing import Any

import pytest
import torch

from nemo_rl_offload.specs.model_families import refusals
from nemo_rl_offload.specs.model_keys import rotation_factor

LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
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


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_the_factor_of_rotations_is_transformers(positions: dict[str, Any], family: str) -> None:
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    section = {"rope_theta": 10000.0, "original_max_position_embeddings": 32, **positions}
    shape = {"hidden_size": 32, "num_attention_heads": 4, "head_dim": 8, "max_position_embeddings": 64}
    content = {"model_type": family, **shape, **({"rope_parameters": section} if positions else {})}
    assert refusals(content) == []
    kind = positions.get("rope_type", "default")
    config = AutoConfig.for_model(**content)
    theirs = 1.0 if kind == "default" else ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))[1]
    assert rotation_factor(content) == pytest.approx(theirs, rel=1e-12)
