"""What rules read of a configuration: recomputation by NeMo-RL's switch."""

from collections.abc import Callable

from nemo_rl_offload.config.validation import CheckedConfig

Check = Callable[..., CheckedConfig]
Refusals = Callable[[str], list[str]]
M = "policy.megatron_cfg"


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


def test_the_switch_beside_listed_modules_says_what_is_recomputed(check: Check) -> None:
    selective = (f"{M}.recompute_granularity=selective", f"{M}.recompute_modules=[mlp_act]")
    assert check(*selective).warnings == []
    (warning,) = check(*selective, f"{M}.activation_checkpointing=true").warnings
    start, _, remedy = warning.partition(" For those: ")
    assert start.endswith("the listed modules are recomputed, not whole layers.")
    assert (
        check(
            *selective,
            *(f"{M}.{each}" for each in remedy[:-1].split()),
            f"{M}.offload_modules=null",
            f"{M}.fine_grained_activation_offloading=false",
            f"{M}.activation_checkpointing=true",
        ).warnings
        == []
    )


def test_offloading_of_layers_excludes_the_switch(refusals: Refusals) -> None:
    layers = "M.cpu_offloading=true M.transformer_impl=transformer_engine M.fine_grained_activation_offloading=false"
    (line,) = refusals(f"{layers} M.activation_checkpointing=true")
    assert line.startswith(f"{M}.cpu_offloading: cannot be combined with activation_checkpointing. Set cpu_offloading")
    assert refusals(f"{layers} M.activation_checkpointing=false") == []
