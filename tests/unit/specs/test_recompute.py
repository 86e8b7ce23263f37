"""NeMo-RL's `activation_checkpointing` beside Megatron-Core's keys of recomputation."""

from typing import Any

import pytest

from nemo_rl_offload.specs.recompute import RECOMPUTE_KEYS, recompute_settings

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
    assert recompute_settings(cfg) == dict(zip(RECOMPUTE_KEYS, expected, strict=True))
