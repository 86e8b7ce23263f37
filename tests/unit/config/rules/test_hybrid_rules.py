"""What is refused of models with Mamba-2 layers, by name; and what is not."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_offload.config.validation import examine
from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.specs.catalogue import load_model_shape

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
    ("key", "override", "feature"),
    [
        ("context_parallel_size", "=2", "context parallelism of Mamba-2 layers, not supported here"),
        ("peft.enabled", "=true", "LoRA of a model with Mamba-2 layers, not supported here"),
        ("tensor_model_parallel_size", "=2", "2 does not divide the model's 3 groups of heads in Mamba-2 layers"),
    ],
)
def test_what_is_not_there_is_refused_by_name(key: str, override: str, feature: str, problems: Problems) -> None:
    assert feature in problems("M-M*", TWO, f"policy.megatron_cfg.{key}{override}")[key]


def test_vllm_is_refused_by_name(problems: Problems) -> None:
    said = problems("M-M*", "policy.generation.backend=vllm")["policy.generation.backend"]
    assert "vLLM with Mamba-2 layers, not supported here" in said


def test_transformer_engines_layers_are_refused_by_name(problems: Problems) -> None:
    said = problems("M-M*", "policy.megatron_cfg.transformer_impl=transformer_engine")["policy.model_name"]
    assert said.startswith("model_type nemotron_h of config.json needs policy.megatron_cfg.transformer_impl: torch.")


@pytest.mark.parametrize(("pattern", "module"), [("MEM*", "mlp_fc1"), ("M-M*", "moe_act"), ("M-M*", "shared_experts")])
def test_modules_that_no_layer_has_are_refused(pattern: str, module: str, problems: Problems) -> None:
    assert (
        f"'{module}' needs " in problems(pattern, f"policy.megatron_cfg.offload_modules=[{module}]")["offload_modules"]
    )


def test_layers_for_further_tokens_can_be_left_out(problems: Problems) -> None:
    said = problems("M-M*", num_nextn_predict_layers=1)["policy.model_name"]
    assert "`policy.megatron_cfg.mtp_num_layers: 0` leaves them out" in said
    assert problems("M-M*", "policy.megatron_cfg.mtp_num_layers=0", num_nextn_predict_layers=1) == {}


def test_a_plan_of_it_is_refused_by_name(make_model: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match="nemotron_h is trained here but not planned yet"):
        load_model_shape("local", make_model(**HYBRID, hybrid_override_pattern="M-M*"))
