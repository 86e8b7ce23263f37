"""NeMo-RL's `activation_checkpointing` beside Megatron-Core's keys of recomputation."""

from collections.abc import Callable
from typing import Any

import pytest

from nemo_rl_offload.config.checks import CheckedConfig
from nemo_rl_offload.config.recompute import RECOMPUTE_KEYS, recompute_settings

Check = Callable[..., CheckedConfig]
Refusals = Callable[[str], list[str]]
M = "policy.megatron_cfg"
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


def test_the_switch_alone_is_legal(check: Check) -> None:
    for value in ("true", "false", "null"):
        assert check(f"{M}.activation_checkpointing={value}", f"{M}.offload_modules=[attn_norm]").warnings == []


def test_what_the_switch_turns_off_is_warned_about(check: Check) -> None:
    full = ["granularity=full", "method=uniform", "num_layers=1"]
    overrides = [f"{M}.recompute_{setting}" for setting in full]
    warnings = check(f"{M}.activation_checkpointing=false", *overrides).warnings
    assert [warning.partition(": ignored with activation_checkpointing false")[0] for warning in warnings] == [
        override.partition("=")[0] for override in overrides
    ]


def test_offloading_of_layers_excludes_the_switch(refusals: Refusals) -> None:
    layers = "M.cpu_offloading=true M.transformer_impl=transformer_engine M.fine_grained_activation_offloading=false"
    (line,) = refusals(f"{layers} M.activation_checkpointing=true")
    assert line.startswith(f"{M}.cpu_offloading: cannot be combined with activation_checkpointing. Set cpu_offloading")
    assert refusals(f"{layers} M.activation_checkpointing=false") == []
