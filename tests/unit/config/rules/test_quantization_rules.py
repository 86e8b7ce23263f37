"""What quantization-aware training needs, and what is said of the rest."""

from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_rl_offload.config.loader import PROJECT_ROOT, load_config
from nemo_rl_offload.config.validation import examine

Refuses = Callable[..., None]
CFG = "policy.quant_cfg"
ON = f"{CFG}=W4A16_NVFP4_CFG policy.precision=bfloat16"
OFF = f"{CFG}=null"
SHAPE = {"hidden_size": 256, "intermediate_size": 512, "num_key_value_heads": 2, "vocab_size": 512}


@pytest.mark.parametrize(
    ("broken", "path", "words", "legal"),
    [
        (f"{ON} policy.precision=float32", "policy.precision", "needs bfloat16", "policy.precision=bfloat16"),
        (f"{ON} {CFG}=W4A16_NVFP4", CFG, "Did you mean 'W4A16_NVFP4_CFG'?", f"{CFG}=W4A16_NVFP4_CFG"),
        (f"{ON} {CFG}=NVFP4_DEFAULT_CFG", CFG, "quantization of linears' inputs", f"{CFG}=NVFP4_MLP_WEIGHT_ONLY_CFG"),
        (
            f"{ON} {CFG}=examples/modelopt/quant_configs/nvfp4_experts_weightonly.yaml",
            CFG,
            "no linear of the model has a name as in it",
            f"{CFG}=examples/modelopt/quant_configs/nvfp4_a16.yaml",
        ),
        (f"{ON} policy.generation.quant_cfg=null", "policy.generation.quant_cfg", "is not policy.quant_cfg", OFF),
        (
            f"{OFF} policy.generation.quant_cfg=W4A16_NVFP4_CFG",
            "policy.generation.quant_cfg",
            "is not policy.quant_cfg",
            "policy.generation.quant_cfg=null",
        ),
        (f"{ON} M.peft.enabled=true", "policy.megatron_cfg.peft.enabled", "adapters beside quantized weights", OFF),
        (
            f"{ON} policy.generation.backend=vllm policy.generation.vllm_cfg.precision=fp8",
            "policy.generation.vllm_cfg.precision",
            "two formats of a weight",
            "policy.generation.vllm_cfg.precision=null",
        ),
    ],
)
def test_a_rule_refuses(
    broken: str, path: str, words: str, legal: str, refuses: Refuses, make_model: Callable[..., Path]
) -> None:
    refuses(f"policy.model_name={make_model(**SHAPE)} {broken}", path, words, legal)


@pytest.mark.parametrize(
    ("shape", "given", "words", "legal"),
    [
        (
            {"intermediate_size": 520},
            "",
            "fc2 has rows of 520 elements on a rank, which are no multiple of 16",
            OFF,
        ),
        (
            {"intermediate_size": 528},
            f"{CFG}=NVFP4_MLP_WEIGHT_ONLY_CFG",
            "fc2 has rows of 528 elements on a rank, which are no multiple of 32",
            f"{CFG}=W4A16_NVFP4_CFG",
        ),
    ],
)
def test_rows_that_blocks_do_not_divide(
    shape: dict[str, int], given: str, words: str, legal: str, refuses: Refuses, make_model: Callable[..., Path]
) -> None:
    refuses(f"{ON} {given} policy.model_name={make_model(**SHAPE | shape)}", CFG, words, legal)


def test_an_output_layer_that_is_the_embedding_stays(
    refuses: Refuses, make_model: Callable[..., Path], tmp_path: Path
) -> None:
    shipped = PROJECT_ROOT / "examples/modelopt/quant_configs/nvfp4_a16.yaml"
    everything = tmp_path / "everything.yaml"
    lines = shipped.read_text().splitlines(keepends=True)
    everything.write_text("".join(line for line in lines if "output_layer" not in line))
    tied = f"{ON} {CFG}={everything} policy.model_name={make_model(**SHAPE, tie_word_embeddings=True)}"
    refuses(tied, CFG, "the model's output layer is its embedding", f"{CFG}={shipped}")
    refuses(tied, CFG, "is its embedding", f"policy.model_name={make_model(**SHAPE, tie_word_embeddings=False)}")


def test_what_it_needs_takes_the_place_of_what_is_asked_for() -> None:
    asked = (
        "policy.megatron_cfg.optimizer.use_precision_aware_optimizer=true",
        "policy.megatron_cfg.distributed_data_parallel_config.overlap_param_gather=true",
    )

    def told(*overrides: str) -> list[str]:
        loaded = load_config(PROJECT_ROOT / "examples/configs/grpo_tiny.yaml", overrides)
        return [line for line in map(str, examine(loaded, run_here=False).warnings) if "has no effect beside" in line]

    assert [line.split(":")[0] for line in told(*ON.split(), *asked)] == [each.split("=")[0] for each in asked]
    assert told(*ON.split()) == told("policy.precision=bfloat16", *asked) == []
