"""Weights go by name from one parallel layout to another, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from ranks import Ranks

pytestmark = pytest.mark.slow

TP, PP, EP = (f"{name}_model_parallel_size=2" for name in ("tensor", "pipeline", "expert"))
ETP = "expert_tensor_parallel_size=2"
VPP = (PP, "virtual_pipeline_model_parallel_size=2", "overlap_p2p_comm=true", "batch_p2p_comm=false")
BF16 = ".precision=bfloat16"


def num_ranks(overrides: tuple[str, ...]) -> int:
    # Ranks that share experts are data-parallel ones, or share layers too.
    has = {*overrides}
    return 2 ** sum(overrides.count(each) for each in (TP, PP)) if has & {TP, PP} else 1 + bool(has & {EP, ETP})


@pytest.mark.parametrize(
    ("family", "train_in", "generate_in"),
    [
        ("qwen2", (TP,), ()),  # with tied embeddings
        ("qwen2", (PP,), (TP,)),
        ("qwen2_odd", (TP,), (PP,)),
        ("llama_odd", (PP,), (TP,)),
        ("qwen2", VPP, (PP,)),
        ("llama", (TP, BF16), (PP, BF16)),
        ("qwen3_moe", (EP,), ()),
        ("qwen3_moe", (PP,), (EP,)),
        ("qwen3_moe", (EP,), (ETP,)),
        ("deepseek_v3", (TP, "sequence_parallel=true", ETP), (PP,)),
        ("deepseek_v3_mtp", (PP,), ()),
        ("deepseek_v3", (TP, "sequence_parallel=true", EP, BF16), (BF16,)),
        ("deepseek_v3", (), (TP, "sequence_parallel=true")),
        ("nemotron_h", (TP, "sequence_parallel=true", EP), (PP,)),
        ("qwen3_5_moe_text", (TP, "sequence_parallel=true", EP), (PP,)),
    ],
)
def test_weights_arrive_bit_for_bit(
    family: str,
    train_in: tuple[str, ...],
    generate_in: tuple[str, ...],
    ranks: Callable[[int], Ranks],
    model_folder: Callable[..., Path],
) -> None:
    folder = model_folder(family, num_hidden_layers=4)
    sent = ranks(num_ranks(train_in)).run("train_and_hand_over", folder, train_in)
    buckets, expected = sent[0]
    assert all(not others for others, _ in sent[1:]), "one rank is the source"
    assert len(buckets) > 10
    received = ranks(num_ranks(generate_in)).run("take_over", folder, generate_in, buckets)
    found = received[0]
    assert found.keys() == expected.keys()
    assert any("e_score_correction_bias" in name for name in found) == family.startswith(("deepseek", "nemotron"))
    for name, (dtype, data) in expected.items():
        assert found[name][0] == dtype, name
        assert np.array_equal(found[name][1], data), name
