"""Keys about activations, and what they mean together."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_offload.specs.activation_memory import ResolvedActivations, resolve_activations
from nemo_rl_offload.specs.offload_modules import MEGATRON_MODULES, NATIVE_MODULES

UNSET: dict[str, Any] = {
    "fine_grained_activation_offloading": None,
    "offload_modules": None,
    "activation_offload": {"engine": "native"},
    "activation_checkpointing": None,
    "recompute_granularity": None,
    "recompute_modules": None,
    "recompute_method": None,
    "recompute_num_layers": None,
    "transformer_impl": "torch",
    "moe_paged_stash": False,
    "moe_expert_rank_capacity_factor": None,
}
OFFLOAD = {"fine_grained_activation_offloading": True}
MEGATRONS = {"activation_offload": {"engine": "megatron"}}
TE = {"transformer_impl": "transformer_engine"}


def resolved(*keys: dict[str, Any], **known: Any) -> ResolvedActivations:
    changes = {name: value for each in keys for name, value in each.items()}
    assert changes.keys() <= UNSET.keys()
    return resolve_activations(UNSET | changes, **known)


def selective(*modules: str, num_layers: int | None = None) -> dict[str, Any]:
    return {
        "recompute_granularity": "selective",
        "recompute_modules": list(modules),
        "recompute_num_layers": num_layers,
    }


def listed(*modules: str) -> dict[str, Any]:
    return OFFLOAD | {"offload_modules": list(modules)}


AUTO = OFFLOAD | {"offload_modules": "auto"}


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (
            {},
            {
                "offloads": False,
                "is_auto": False,
                "modules": (),
                "own_fields": {"moe_expert_rank_capacity_factor": None},
            },
        ),
        ({"offload_modules": ["moe_act"]}, {"modules": (), "known_to_megatron": []}),
        ({"fine_grained_activation_offloading": False, "offload_modules": "auto"}, {"is_auto": False, "modules": ()}),
        (OFFLOAD, {"offloads": True, "modules": ()}),
        (listed("mlp_fc1", "moe_act"), {"is_auto": False, "modules": ("mlp_fc1", "moe_act")}),
        (listed("mlp_fc1", "moe_act"), {"known_to_megatron": ["moe_act"], "listed_modules": ("mlp_fc1", "moe_act")}),
        (AUTO, {"is_auto": True, "modules": NATIVE_MODULES, "listed_modules": (), "known_to_megatron": []}),
        (MEGATRONS, {"engine": "megatron", "is_native": False}),
        ({"moe_expert_rank_capacity_factor": 1.5}, {"own_fields": {"moe_expert_rank_capacity_factor": 1.5}}),
    ],
)
def test_what_is_offloaded(keys: dict[str, Any], expected: dict[str, Any]) -> None:
    activations = resolved(keys)
    assert {name: getattr(activations, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("keys", "is_latent", "taken"),
    [
        ({}, True, set()),
        ({"moe_paged_stash": True}, True, {"expert_fc1", "moe_act", "expert_fc2"}),
        (selective("layernorm"), True, {"qkv_linear", "shared_experts"}),
        (selective("layernorm"), False, {"shared_experts"}),
        (selective("mla_up_proj", "moe_act"), True, {"core_attn", "expert_fc2"}),
        (selective("layernorm") | {"recompute_granularity": None}, True, set()),
        (selective("layernorm") | {"activation_checkpointing": False}, True, set()),
    ],
)
def test_what_auto_chooses_from(keys: dict[str, Any], is_latent: bool, taken: set[str]) -> None:
    activations = resolved(AUTO, keys, has_latent_attention=is_latent)
    assert set(NATIVE_MODULES) - set(activations.modules) == taken


@pytest.mark.parametrize(
    ("keys", "is_latent", "has_experts", "expected"),
    [
        (listed("attn_norm", "core_attn", "mlp_norm", "mlp_act"), True, True, []),
        (listed("attn_norm", "core_attn"), False, True, ["attn_norm"]),
        (listed("attn_norm", "mlp_norm"), True, False, ["mlp_norm"]),
        (listed("attn_norm") | {"recompute_granularity": "full"}, False, False, []),
        (listed("attn_norm") | {"recompute_granularity": "full"} | MEGATRONS, False, False, ["attn_norm"]),
        (listed("shared_experts"), True, True, ["shared_experts"]),
        (AUTO, False, False, []),
    ],
)
def test_modules_that_transformer_engine_has_fused(
    keys: dict[str, Any], is_latent: bool, has_experts: bool, expected: list[str]
) -> None:
    activations = resolved(TE, keys, has_latent_attention=is_latent, has_experts=has_experts)
    assert activations.without_boundary == expected


@pytest.mark.parametrize(
    ("keys", "opens"),
    [
        (listed("core_attn") | TE, True),
        (listed("core_attn") | TE | MEGATRONS, False),
        (listed("core_attn"), False),
        (TE, False),
        (TE | selective("mlp_act"), True),
        (TE | selective("mlp"), False),
    ],
)
def test_whether_dense_mlps_become_this_projects(keys: dict[str, Any], opens: bool) -> None:
    assert resolved(keys).opens_dense_mlps is opens


def test_the_machine_says_what_auto_layers_are() -> None:
    auto = {"transformer_impl": "auto"}
    assert resolved(auto).transformer_impl == "auto"
    assert resolved(auto, transformer_impl="torch").megatron_view["transformer_impl"] == "local"


def test_unset_keys_leave_megatrons_fields_alone() -> None:
    assert resolved(TE).megatron_view == {"transformer_impl": "transformer_engine"}
    assert resolved(TE).own_fields == {}


def test_the_stash_is_not_megatrons() -> None:
    torch_layers = resolved({"moe_paged_stash": True, "moe_expert_rank_capacity_factor": 2.0})
    shown = {name: torch_layers.megatron_view[name] for name in ("moe_paged_stash", "moe_expert_rank_capacity_factor")}
    assert shown == {"moe_paged_stash": False, "moe_expert_rank_capacity_factor": None}
    assert torch_layers.own_fields == {"moe_expert_rank_capacity_factor": 2.0}


@given(
    st.sampled_from(["torch", "transformer_engine"]),
    st.booleans(),
    st.lists(st.sampled_from(sorted({*MEGATRON_MODULES, *NATIVE_MODULES})), unique=True),
)
def test_megatrons_view(transformer_impl: str, is_offloading: bool, modules: list[str]) -> None:
    keys = {"fine_grained_activation_offloading": is_offloading, "offload_modules": modules}
    activations = resolved(keys, transformer_impl=transformer_impl)
    view, own = activations.megatron_view, activations.own_fields
    assert view["transformer_impl"] == {"torch": "local"}.get(transformer_impl, transformer_impl)
    expected = [name for name in modules if is_offloading and name in MEGATRON_MODULES]
    assert view["offload_modules"] == expected
    assert view["fine_grained_activation_offloading"] == (len(expected) > 0)
    assert own["offload_modules"] == (modules if is_offloading else [])
    assert own["fine_grained_activation_offloading"] is is_offloading
