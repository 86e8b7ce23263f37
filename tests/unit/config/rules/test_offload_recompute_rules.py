"""Rules about offloading beside recomputation, and warnings about modules that have nothing left to offload."""

from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_rl_offload.config.validation import CheckedConfig

Check = Callable[..., CheckedConfig]
MakeModel = Callable[..., Path]
M = "policy.megatron_cfg"
FULL = (f"{M}.recompute_granularity=full", f"{M}.recompute_method=uniform", f"{M}.recompute_num_layers=1")
BLOCK = (f"{M}.recompute_granularity=full", f"{M}.recompute_method=block")
SELECTIVE = f"{M}.recompute_granularity=selective"


@pytest.mark.parametrize(
    ("recompute", "modules", "silent"),
    [
        (FULL, "attn_norm", []),
        (FULL, "attn_norm,core_attn,mlp_act", ["core_attn", "mlp_act"]),
        ((*BLOCK, f"{M}.recompute_num_layers=4"), "core_attn", ["core_attn"]),
        ((*BLOCK, f"{M}.recompute_num_layers=3"), "core_attn", []),
        ((SELECTIVE,), "attn_norm,core_attn", ["core_attn"]),
        ((SELECTIVE, f"{M}.recompute_modules=[mlp]"), "core_attn,mlp_norm,mlp_act", ["mlp_act"]),
        ((SELECTIVE, f"{M}.recompute_modules=[mlp_fc1]"), "core_attn,mlp_norm,mlp_fc1,mlp_act", ["mlp_fc1", "mlp_act"]),
        ((SELECTIVE, f"{M}.recompute_modules=[mlp_fc1]", f"{M}.recompute_num_layers=1"), "mlp_norm,mlp_act", []),
        ((SELECTIVE, f"{M}.recompute_modules=[mlp_act]"), "mlp_norm,mlp_act", []),
        ((SELECTIVE, f"{M}.recompute_modules=[layernorm]"), "attn_norm,qkv_linear,mlp_norm", []),
    ],
)
def test_modules_that_save_nothing_are_warned_about(
    check: Check, recompute: tuple[str, ...], modules: str, silent: list[str]
) -> None:
    warnings = check(*recompute, f"{M}.offload_modules=[{modules}]").warnings
    assert [warning.split("'")[1] for warning in warnings if "saves nothing" in warning] == silent
    assert all(warning.startswith(f"{M}.offload_modules: ") for warning in warnings)


def test_norms_of_experts_save_beside_recomputed_dense_mlps(check: Check, make_model: MakeModel) -> None:
    model = f"policy.model_name={make_model(num_experts=8, decoder_sparse_step=2)}"
    listed = f"{M}.offload_modules=[mlp_norm,mlp_fc1]"
    (warning,) = check(model, listed, SELECTIVE, f"{M}.recompute_modules=[mlp]").warnings
    assert "'mlp_fc1' saves nothing while recompute_modules has 'mlp'" in warning


@pytest.mark.parametrize(
    ("module", "recompute", "legal"),
    [("qkv_linear", "layernorm", "moe_act"), ("core_attn", "mla_up_proj", "layernorm")],
)
def test_what_recomputation_discards_is_not_offloaded(
    refusals: Callable[[str], list[str]], make_model: MakeModel, module: str, recompute: str, legal: str
) -> None:
    model = f"policy.model_name={make_model(n_routed_experts=8, kv_lora_rank=8)}"
    settings = f"{model} M.offload_modules=[{module}] M.recompute_granularity=selective"
    (line,) = refusals(f"{settings} M.recompute_modules=[{recompute}]")
    assert f"'{module}' saves what recompute_modules '{recompute}' discards" in line
    assert refusals(f"{settings} M.recompute_modules=[{legal}]") == []
    assert refusals(f"MOE M.offload_modules=[qkv_linear] {settings.split()[-1]} M.recompute_modules=[layernorm]") == []


def test_an_activation_within_what_is_recomputed_anyway_is_warned_about(check: Check) -> None:
    for whole in ("mlp", "mlp_fc1"):
        listed = f"{M}.recompute_modules=[mlp_act,{whole}]"
        (warning,) = check(SELECTIVE, listed).warnings
        assert f"'mlp_act' changes nothing: '{whole}' contains it" in warning
        assert check(SELECTIVE, listed, f"{M}.recompute_num_layers=2").warnings == []
