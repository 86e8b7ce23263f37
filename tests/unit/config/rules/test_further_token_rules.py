"""Keys of layers that predict further tokens: which are honoured, and what is said of the others."""

from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_rl_offload.config.validation import CheckedConfig
from nemo_rl_offload.errors import ConfigError

Check = Callable[..., CheckedConfig]
Refusals = Callable[[str], list[str]]
MakeModel = Callable[..., Path]
M = "policy.megatron_cfg"


@pytest.mark.parametrize(
    ("there", "keys", "said"),
    [
        (0, "mtp_num_layers=0", None),
        (0, "mtp_num_layers=1", ("mtp_num_layers", "says, 0. Set it to 0.")),
        (0, "mtp_use_repeated_layer=true", None),
        (1, "mtp_num_layers=0", None),
        (1, "mtp_num_layers=1", None),
        (1, "mtp_num_layers=2", ("mtp_num_layers", "says, 1. Set it to 1, or to 0 to leave them out.")),
        (1, "mtp_use_repeated_layer=true", None),
        (2, "mtp_num_layers=1", ("mtp_num_layers", "Set it to 2, or to 0 to leave them out.")),
        (2, "mtp_use_repeated_layer=true", ("mtp_use_repeated_layer", "each of the model's 2 is trained")),
        (2, "mtp_use_repeated_layer=true M.mtp_num_layers=2", ("mtp_use_repeated_layer", "Set it to false.")),
        (2, "mtp_use_repeated_layer=true M.mtp_num_layers=0", None),
        (1, "mtp_loss_scaling_factor=0.3 M.mtp_detach_heads=true", None),
        (1, "model_overrides={mtp_loss_scaling_factor:0.3}", None),  # as runs of an earlier version have it
        (
            1,
            "model_overrides={mtp_loss_scaling_factor:0.3} M.mtp_loss_scaling_factor=0.1",
            ("model_overrides.mtp_loss_scaling_factor", "has a key of its own"),
        ),
        (1, "model_overrides={mtp_loss_scaling_factor:a}", ("model_overrides.mtp_loss_scaling_factor", "not allowed")),
        (
            1,
            "model_overrides={mtp_num_layers:0}",
            ("model_overrides.mtp_num_layers", "Set policy.megatron_cfg.mtp_num"),
        ),
    ],
)
def test_what_is_refused(
    there: int, keys: str, said: tuple[str, str] | None, refusals: Refusals, make_model: MakeModel
) -> None:
    lines = refusals(f"policy.model_name={make_model(num_nextn_predict_layers=there)} M.{keys}")
    if said is None:
        assert lines == []
    else:
        (line,) = lines
        assert line.startswith(f"{M}.{said[0]}: ")
        assert said[1] in line


@pytest.mark.parametrize(("there", "keys", "why"), [(0, [], "no such layers"), (1, ["mtp_num_layers=0"], "layers 0.")])
def test_what_nothing_reads(there: int, keys: list[str], why: str, check: Check, make_model: MakeModel) -> None:
    model = f"policy.model_name={make_model(num_nextn_predict_layers=there)}"
    given = [f"{M}.{key}" for key in ("mtp_loss_scaling_factor=0.1", "mtp_detach_heads=true", *keys)]
    lines = check(model, *given).warnings
    assert [line.partition(": ignored ")[0] for line in lines] == [path.split("=")[0] for path in given[:2]]
    assert all(why in line for line in lines)
    assert check(model, f"{M}.mtp_loss_scaling_factor=0", *given[2:]).warnings == []


def test_layers_that_are_left_out_are_in_no_way(check: Check, refusals: Refusals, make_model: MakeModel) -> None:
    model = f"policy.model_name={make_model(num_nextn_predict_layers=1)} M.offload_modules=[attn_norm]"
    recompute = "M.recompute_granularity=full M.recompute_method=uniform M.recompute_num_layers=2"
    stages = "M.pipeline_model_parallel_size=2 M.pipeline_model_parallel_layout='Ett|ttL'"
    for given in (recompute, stages):
        assert len(refusals(f"{model} {given}")) == 1
        assert refusals(f"{model} {given} M.mtp_num_layers=0") == []


@pytest.mark.parametrize("value", ["-1", "1.5", "true", "all"])
def test_numbers(value: str, check: Check) -> None:
    with pytest.raises(ConfigError, match=rf"{M}\.mtp_num_layers: .*Allowed: a whole number"):
        check(f"{M}.mtp_num_layers={value}")
