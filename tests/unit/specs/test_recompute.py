"""NeMo-RL's `activation_checkpointing` beside Megatron-Core's keys of recomputation."""

from typing import Any

import pytest

from nemo_rl_offload.specs.recompute import RECOMPUTE_KEYS, ResolvedRecompute

NOTHING = (None, None, None, None)
LAYER_BY_LAYER = ("full", None, "uniform", 1)


@pytest.mark.parametrize(
    ("switch", "given", "expected"),
    [
        (None, NOTHING, NOTHING),
        (None, ("full", None, "block", 2), ("full", None, "block", 2)),
        (True, NOTHING, LAYER_BY_LAYER),
        (True, ("full", None, None, None), LAYER_BY_LAYER),
        (True, ("full", None, "block", 2), ("full", None, "block", 2)),
        (True, ("selective", ["moe"], None, None), ("selective", ["moe"], None, None)),
        (False, ("full", None, "block", 2), NOTHING),
        (False, ("selective", ["moe"], None, None), NOTHING),
    ],
)
def test_what_is_in_force(switch: bool | None, given: tuple[Any, ...], expected: tuple[Any, ...]) -> None:
    cfg = {"activation_checkpointing": switch, **dict(zip(RECOMPUTE_KEYS, given, strict=True))}
    assert ResolvedRecompute.resolve(cfg).keys == dict(zip(RECOMPUTE_KEYS, expected, strict=True))


@pytest.mark.parametrize(
    ("given", "covered", "has_parts", "told"),
    [
        (NOTHING, (), False, NOTHING),
        (("full", ["mlp_act"], "block", 2), (), False, ("full", ["mlp_act"], "block", 2)),
        (("selective", None, None, None), ("core_attn",), False, ("selective", None, None, None)),
        (("selective", ["moe_act"], None, None), ("moe_act",), False, ("selective", ["moe_act"], None, None)),
        (("selective", ["mlp"], None, 3), ("mlp",), False, ("selective", ["mlp"], None, None)),
        (
            ("selective", ["core_attn", "mlp_fc1"], None, 3),
            ("core_attn", "mlp_fc1"),
            True,
            ("selective", ["core_attn"], None, None),
        ),
    ],
)
def test_what_is_covered_and_what_megatron_is_told_of_it(
    given: tuple[Any, ...], covered: tuple[str, ...], has_parts: bool, told: tuple[Any, ...]
) -> None:
    cfg = {"activation_checkpointing": None, **dict(zip(RECOMPUTE_KEYS, given, strict=True))}
    resolved = ResolvedRecompute.resolve(cfg)
    assert (resolved.modules, resolved.has_dense_mlp_parts) == (covered, has_parts)
    assert resolved.keys_for_megatron(has_experts=True) == dict(zip(RECOMPUTE_KEYS, told, strict=True))


def test_megatron_is_not_told_of_experts_that_a_model_has_not() -> None:
    """It refuses `moe_act` there beside Transformer Engine's layers; a list for both kinds fits all models."""
    cfg = {"activation_checkpointing": None, **dict.fromkeys(RECOMPUTE_KEYS)}
    cfg |= {"recompute_granularity": "selective", "recompute_modules": ["mlp_act", "moe_act", "core_attn"]}
    resolved = ResolvedRecompute.resolve(cfg)
    assert resolved.keys_for_megatron(has_experts=False)["recompute_modules"] == ["core_attn"]
    assert resolved.keys_for_megatron(has_experts=True)["recompute_modules"] == ["moe_act", "core_attn"]
