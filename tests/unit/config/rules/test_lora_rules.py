"""What `check` says about adapters."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_offload.config.loader import PROJECT_ROOT, load_config
from nemo_rl_offload.config.validation import examine

P = "policy.megatron_cfg.peft"
ON = (f"{P}.enabled=true", f"{P}.target_modules=[linear_proj,linear_fc2]")
EACH = f"{P}.target_modules=[linear_q,linear_v]"


def examined(*overrides: str) -> Any:
    path = PROJECT_ROOT / "examples/configs/sft_tiny.yaml"
    texts = [text.replace("M.", "policy.megatron_cfg.", 1) if text.startswith("M.") else text for text in overrides]
    return examine(load_config(path, texts), run_here=False)


def test_the_exemplar_passes() -> None:
    found = examine(load_config(Path(PROJECT_ROOT / "examples/configs/sft_tiny_lora.yaml")), run_here=False)
    assert not found.problems
    assert not found.warnings


@pytest.mark.parametrize(
    ("overrides", "path", "words"),
    [
        ((f"{P}.target_modules=[linear_prj]",), f"{P}.target_modules", "Did you mean 'linear_proj'?"),
        ((f"{P}.target_modules=[]",), f"{P}.target_modules", "LoRA of a tied output layer, not supported here"),
        ((f"{P}.dim=5", "M.tensor_model_parallel_size=2"), f"{P}.dim", "not divisible by tensor_model_parallel_size 2"),
        ((f"{P}.lora_A_init_method=zero",), f"{P}.lora_A_init_method", "Set xavier"),
        ((f"{P}.lora_dtype=bfloat16",), f"{P}.lora_dtype", "is not policy.precision, float32"),
        ((EACH, f"{P}.a2a_experimental=true"), f"{P}.a2a_experimental", "linear_qkv and linear_fc1"),
        (("M.transformer_impl=auto", "M.use_transformer_engine_op_fuser=true"), "policy.megatron_cfg.use_transformer_engine_op_fuser", "not beside peft"),  # noqa: E501
        (("M.transformer_impl=auto", "M.gradient_accumulation_fusion=true"), "policy.megatron_cfg.gradient_accumulation_fusion", "not beside peft"),  # noqa: E501
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused(overrides: tuple[str, ...], path: str, words: str) -> None:
    found = {
        problem.path: problem.message for problem in examined(*ON, "cluster.gpus_per_node=auto", *overrides).problems
    }
    assert words in found[path]
    off = examined(*ON, "cluster.gpus_per_node=auto", *overrides, f"{P}.enabled=false")
    assert path not in {problem.path for problem in off.problems}


def test_experts_have_rules_of_their_own(tmp_path: Path) -> None:
    model = (
        '{"model_type": "qwen3_moe", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32,'
        ' "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "vocab_size": 260}'
    )
    (tmp_path / "config.json").write_text(model)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    given = (f"policy.model_name={tmp_path}", *ON, "M.moe_expert_rank_capacity_factor=1.5")
    rate = "policy.megatron_cfg.moe_router_bias_update_rate"
    found = {problem.path: problem.message for problem in examined(*given, f"{rate}=0.001").problems}
    assert "rows that hold no token" in found["policy.megatron_cfg.moe_expert_rank_capacity_factor"]
    assert "peft freezes the model" in found[rate]
    attention = examined(*given, f"{P}.target_modules=[linear_proj]", f"{rate}=0.0")
    assert "policy.megatron_cfg.moe_expert_rank_capacity_factor" not in {each.path for each in attention.problems}
    shared = "policy.megatron_cfg.expert_tensor_parallel_size"
    for targets, is_refused in (("[linear_proj,linear_fc2]", True), ("[linear_proj]", False)):
        problems = examined(*given[:1], *ON, f"{shared}=2", f"{P}.target_modules={targets}").problems
        said = [each.message for each in problems if each.path == shared]
        assert ["adapters of experts that ranks share, not supported here" in text for text in said] == [
            True
        ] * is_refused
    each = (f"policy.model_name={tmp_path}", *ON, f"{P}.share_expert_adapters=false")
    for targets, is_said in (("[linear_proj,linear_fc2]", False), ("[linear_proj]", True)):
        warned = examined(*each, f"{P}.target_modules={targets}").warnings
        assert (f"{P}.share_expert_adapters" in {warning.path for warning in warned}) == is_said


HEAD = f"{P}.target_modules=[linear_proj,output_layer]"
ODD = "M.tensor_model_parallel_size=2"


@pytest.mark.parametrize(
    ("shape", "overrides", "path", "words"),
    [
        ({"vocab_size": 261}, (HEAD, ODD), f"{P}.target_modules", "261 rows tensor_model_parallel_size 2 does not divide"),  # noqa: E501
        ({"vocab_size": 261}, (f"{P}.target_modules=[]", ODD), f"{P}.target_modules", "261 rows"),
        ({}, (HEAD, f"{P}.dropout=0.1"), f"{P}.dropout", "0.1 is not honoured in an adapter of output_layer"),
        ({"num_nextn_predict_layers": 1}, (HEAD, "M.mtp_detach_heads=true"), "policy.megatron_cfg.mtp_detach_heads", "not from its adapter"),  # noqa: E501
    ],
)  # fmt: skip
def test_the_output_layer_has_rules_of_its_own(
    shape: dict[str, int], overrides: tuple[str, ...], path: str, words: str, make_model: Callable[..., Path]
) -> None:
    sizes = {"hidden_size": 32, "vocab_size": 260, "tie_word_embeddings": False} | shape
    model = (f"policy.model_name={make_model(**sizes)}", *ON)
    found = {problem.path: problem.message for problem in examined(*model, *overrides).problems}
    assert words in found[path]
    other = examined(*model, *overrides, f"{P}.target_modules=[linear_proj]").problems
    assert not [each for each in other if each.path == path and words in each.message]


@pytest.mark.parametrize(
    ("overrides", "path", "words"),
    [
        ((f"{P}.enabled=false",), f"{P}.target_modules", "no effect"),
        ((f"{P}.enabled=false", f"{P}.target_modules=[]", f"{P}.dim=16"), f"{P}.dim", "no effect"),
        (("M.freeze_moe_router=true",), "policy.megatron_cfg.freeze_moe_router", "peft freezes the whole model"),
        (("M.offload_modules=[mlp_fc1]",), "policy.megatron_cfg.offload_modules", "mlp_fc1 saves nothing"),
        ((f"{P}.share_expert_adapters=false",), f"{P}.share_expert_adapters", "no effect: no linear of experts"),
    ],
)
def test_what_has_no_effect_is_said(overrides: tuple[str, ...], path: str, words: str) -> None:
    assert any(each.path == path and words in each.message for each in examined(*ON, *overrides).warnings)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ((f"{P}.target_modules=[decoder.layers.0.self_attention.linear_qkv]",), "pipeline stage 1 has no adapter"),
        (("M.pipeline_model_parallel_layout=E|ttttL",), "pipeline stage 0 has no adapter"),
        ((f"{P}.target_modules=[linear_qkv]",), ""),
    ],
)
def test_each_stage_needs_an_adapter(overrides: tuple[str, ...], words: str) -> None:
    problems = examined(*ON, "M.pipeline_model_parallel_size=2", *overrides).problems
    found = [each.message for each in problems if "pipeline stage" in each.message]
    assert [message for message in found if words and words in message] == found
    assert bool(found) == bool(words)


def test_the_output_layer_is_the_last_stages(make_model: Callable[..., Path]) -> None:
    model = f"policy.model_name={make_model(hidden_size=32, vocab_size=260, tie_word_embeddings=False)}"
    layout = ("M.pipeline_model_parallel_size=2", "M.pipeline_model_parallel_layout=Etttt|L")
    for target, stages in (("[linear_proj]", "1"), ("[output_layer]", "0"), ("[linear_proj,output_layer]", "")):
        problems = examined(model, *ON, *layout, f"{P}.target_modules={target}").problems
        found = [each.message for each in problems if "has no adapter" in each.message]
        assert [message.split()[2] for message in found] == list(stages)


def test_a_misspelt_exclusion_is_named() -> None:
    given = (f"{P}.target_modules=[]", f"{P}.exclude_modules=[linear_fcl,output_layer]")
    (problem,) = [each for each in examined(*ON, *given).problems if each.path == f"{P}.exclude_modules"]
    assert problem.message.startswith("linear_fcl matches nothing in the model. Did you mean 'linear_fc")
