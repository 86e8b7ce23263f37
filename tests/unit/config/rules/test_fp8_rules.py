"""What 8 bits need, in training and in vLLM's engines, and what is said of the rest."""

from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_rl_offload.config.loader import PROJECT_ROOT, load_config
from nemo_rl_offload.config.validation import examine

Refuses = Callable[..., None]
FP8 = "policy.megatron_cfg.fp8_cfg"
CFG = "policy.generation.vllm_cfg"
VLLM = "policy.generation.backend=vllm"
BFLOAT16 = "policy.precision=bfloat16"
ON = f"{FP8}.enabled=true M.transformer_impl=transformer_engine M.offload_modules=[core_attn] {BFLOAT16} {VLLM}"
OFF = f"{FP8}.enabled=false"
ROLLOUTS = f"{VLLM} {CFG}.precision=fp8 {BFLOAT16}"


SHAPE = {"hidden_size": 256, "intermediate_size": 512, "num_key_value_heads": 2, "vocab_size": 512}


@pytest.mark.parametrize(
    ("broken", "path", "words", "legal"),
    [
        (f"{ON} policy.precision=float32", "policy.precision", "needs bfloat16", BFLOAT16),
        (f"{ON} {FP8}.fp8_recipe=delayed", f"{FP8}.fp8_recipe", "delayed scaling, not", f"{FP8}.fp8_recipe=tensorwise"),
        (f"{ON} {FP8}.fp8_param=true", f"{FP8}.fp8_param", "weights in 8 bits, not", f"{FP8}.fp8_param=false"),
        (f"{ON} M.peft.enabled=true", "policy.megatron_cfg.peft.enabled", "LoRA beside linears in 8 bits", OFF),
        (
            f"{ON} M.cpu_offloading=true M.cpu_offloading_num_layers=1 M.fine_grained_activation_offloading=false",
            "policy.megatron_cfg.cpu_offloading",
            "offloading of whole layers in 8 bits",
            OFF,
        ),
        (
            f"{ON} policy.generation.backend=megatron",
            "policy.generation.backend",
            "generation in 8 bits by Megatron-Core, not supported",
            OFF,
        ),
        (
            f"{ON} M.recompute_granularity=selective M.recompute_modules=[mlp_act]",
            "policy.megatron_cfg.recompute_modules",
            "'mlp_act' cannot be recomputed in 8 bits",
            "M.recompute_modules=[mlp]",
        ),
        (
            f"{ON} policy.sequence_packing.enabled=true policy.sequence_packing.train_mb_tokens=127 "
            "policy.sequence_packing.logprob_mb_tokens=128 policy.sequence_packing.sequence_length_round=1",
            "policy.sequence_packing.train_mb_tokens",
            "rounded up. Set at least 128",
            f"{FP8}.fp8_recipe=tensorwise",
        ),
        (
            f"{ON} M.recompute_granularity=full M.recompute_method=uniform M.recompute_num_layers=1 "
            "M.offload_modules=[attn_norm]",
            "policy.megatron_cfg.offload_modules",
            "what full recomputation keeps in 8 bits, not supported",
            "M.fine_grained_activation_offloading=false",
        ),
        (
            f"{ON} M.recompute_granularity=selective M.recompute_modules=[mlp] M.offload_modules=[core_attn,mlp_fc1]",
            "policy.megatron_cfg.offload_modules",
            "what recomputation of mlp keeps in 8 bits, not supported",
            "M.offload_modules=[core_attn]",
        ),
        (f"{ON} M.transformer_impl=torch", f"{FP8}.enabled", "needs Transformer Engine", OFF),
        (
            "+M.model_overrides.fp8=hybrid",
            "policy.megatron_cfg.model_overrides.fp8",
            "is set by policy.megatron_cfg.fp8_cfg",
            "~policy.megatron_cfg.model_overrides.fp8",
        ),
        (f"{ROLLOUTS} policy.precision=float32", "policy.precision", "needs bfloat16", BFLOAT16),
        (f"{ROLLOUTS} {CFG}.is_mx=true", f"{CFG}.is_mx", "MXFP8 in generation, not supported", f"{CFG}.is_mx=false"),
        (
            f"{ROLLOUTS} {CFG}.num_first_layers_in_bf16=1 {CFG}.num_last_layers_in_bf16=30",
            f"{CFG}.num_first_layers_in_bf16",
            "leave none in 8 bits",
            f"{CFG}.precision=bfloat16",
        ),
        (
            f"{ROLLOUTS} {CFG}.quantization_ignored_layer_kws=['']",
            f"{CFG}.quantization_ignored_layer_kws",
            "an empty word",
            f"{CFG}.quantization_ignored_layer_kws=[o_proj]",
        ),
    ],
)  # fmt: skip
def test_rules(
    refuses: Refuses, make_model: Callable[..., Path], broken: str, path: str, words: str, legal: str
) -> None:
    refuses(f"policy.model_name={make_model(**SHAPE)} {broken}", path, words, legal)


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ({"hidden_size": 2056, "head_dim": 64}, "hidden_size 2056"),
        ({"num_key_value_heads": 1, "head_dim": 20}, "width of queries, keys and values 120"),
    ],
)
def test_widths_that_blocks_do_not_divide(
    shape: dict[str, int], words: str, refuses: Refuses, make_model: Callable[..., Path]
) -> None:
    refuses(f"{ON} policy.model_name={make_model(**SHAPE | shape)}", f"{FP8}.enabled", words, OFF)


def test_parts_of_experts_that_blocks_do_not_divide(refuses: Refuses, make_model: Callable[..., Path]) -> None:
    model = make_model(**SHAPE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48)
    shared = f"{ON} policy.model_name={model} M.expert_tensor_parallel_size=2"
    words = "routed experts' intermediate_size 24 on a rank is no multiple of 16"
    refuses(shared, f"{FP8}.enabled", words, "M.expert_tensor_parallel_size=1")


IGNORED = f"{CFG}.quantization_ignored_layer_kws"
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@pytest.mark.parametrize(
    ("shape", "given", "words", "legal"),
    [
        ({}, "[q_proj]", "leave q_proj out and not k_proj, v_proj", "[q_proj,k_proj,v_proj]"),
        ({}, "[up_proj]", "leave up_proj out and not gate_proj", "[gate_proj,up_proj]"),
        ({}, "[layers.1.mlp.gate]", "leave gate_proj out and not up_proj", "[layers.1.mlp]"),
        ({}, "[qkv_proj]", "'qkv_proj' is in no linear's path", "[self_attn]"),
        ({}, "[o_prj]", "take part of a name: self_attn.o_proj, self_attn.q_proj", "[o_proj]"),
        ({}, "[experts]", "'experts' is in no linear's path", "[down_proj]"),
        (EXPERTS, "[down_proj]", "'down_proj' is in no linear's path", "[experts]"),
    ],
)
def test_words_of_linears_that_stay_as_they_are(
    shape: dict[str, int], given: str, words: str, legal: str, refuses: Refuses, make_model: Callable[..., Path]
) -> None:
    model = f"policy.model_name={make_model(**SHAPE | shape)}"
    refuses(f"{ROLLOUTS} {model} {IGNORED}={given}", IGNORED, words, f"{IGNORED}={legal}")


WIDE = f"{ON} M.first_last_layers_bf16=true"


@pytest.mark.parametrize(
    ("given", "end", "words"),
    [
        ("M.num_layers_at_start_in_bf16=3", "start", "3 is above the 2 layers of the model in a pipeline stage"),
        ("M.num_layers_at_end_in_bf16=4", "end", "4 is above the 2 layers of the model in a pipeline stage"),
        ("", "start", "1 + 1 of the model's 2 layers leave none in 8 bits"),
    ],
)
def test_layers_that_stay_in_bfloat16(
    given: str, end: str, words: str, refuses: Refuses, make_model: Callable[..., Path]
) -> None:
    path = f"policy.megatron_cfg.num_layers_at_{end}_in_bf16"
    model = f"policy.model_name={make_model(**SHAPE, num_hidden_layers=2)}"
    refuses(f"{WIDE} {model} {given}", path, words, "M.num_layers_at_start_in_bf16=1 M.num_layers_at_end_in_bf16=0")


def test_scales_of_mxfp8_are_wider(refuses: Refuses, make_model: Callable[..., Path]) -> None:
    model = f"policy.model_name={make_model(**SHAPE | {'intermediate_size': 528})} {FP8}.fp8_recipe=mxfp8"
    words = "intermediate_size 528 on a rank is no multiple of 32"
    refuses(f"{ON} {model}", f"{FP8}.enabled", words, f"{FP8}.fp8_recipe=tensorwise")


def test_a_teacher_is_computed_in_8_bits_too(make_model: Callable[..., Path]) -> None:
    def told(teacher: Path, *overrides: str) -> list[str]:
        more = [VLLM, BFLOAT16, *ON.replace("M.", "policy.megatron_cfg.").split(), f"teacher.model_name={teacher}"]
        models = [f"policy.model_name={make_model(**SHAPE)}", *more, *overrides]
        loaded = load_config(PROJECT_ROOT / "examples/configs/distillation_tiny.yaml", models)
        return [line for line in map(str, examine(loaded, run_here=False).problems) if "8 bits" in line]

    assert told(make_model(**SHAPE)) == []
    (line,) = told(make_model(**SHAPE | {"intermediate_size": 520}))
    assert "the teacher's intermediate_size 520 on a rank is no multiple of 16" in line


@pytest.mark.parametrize("where", [f"{FP8}.enabled=true", f"{CFG}.precision=fp8"])
@pytest.mark.parametrize("algorithm", ["grpo", "distillation"])
def test_one_line_says_that_engines_have_other_probabilities(where: str, algorithm: str) -> None:
    def told(*overrides: str) -> list[str]:
        loaded = load_config(PROJECT_ROOT / f"examples/configs/{algorithm}_tiny.yaml", [VLLM, BFLOAT16, *overrides])
        warnings = map(str, examine(loaded, run_here=False).warnings)
        return [line for line in warnings if "use_importance_sampling_correction" in line]

    assert len(told(where)) == (algorithm == "grpo")
    assert not told()
    if algorithm == "grpo":
        assert not told(where, "loss_fn.use_importance_sampling_correction=true")
