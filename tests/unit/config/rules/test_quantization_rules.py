"""What quantization-aware training needs, and what is said of the rest."""

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

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


NVFP4 = {"num_bits": "e2m1", "block_sizes": {-1: 16, "type": "dynamic", "scale_bits": "e4m3"}}


def written(path: Path, *patterns: str) -> Path:
    """A configuration in which quantizers are off but those of linears in MLPs, and of further patterns."""
    entries = [{"quantizer_name": pattern, "cfg": NVFP4} for pattern in ("*mlp*weight_quantizer", *patterns)]
    path.write_text(yaml.safe_dump({"quant_cfg": [{"quantizer_name": "*", "enable": False}, *entries]}))
    return path


@pytest.mark.parametrize(
    ("pattern", "what", "quantizer"),
    [
        ("*mlp*output_quantizer", "linears' outputs", "layers.0.mlp.linear_fc1.output_quantizer"),
        ("*.layers.1.self_att*output_quantizer", "linears' outputs", "layers.1.self_attention.linear_qkv.output_quan"),
        ("output_layer.out*", "linears' outputs", "output_layer.output_quantizer"),
        ("*[kv]_bmm_quantizer", "the key/value cache", "layers.0.self_attention.core_attention.k_bmm_quantizer"),
        ("*.1.self_attention*q_bmm*", "attention's queries", "layers.1.self_attention.core_attention.q_bmm_quantizer"),
    ],
)
def test_further_quantizers_are_refused(
    pattern: str, what: str, quantizer: str, refuses: Refuses, make_model: Callable[..., Path], tmp_path: Path
) -> None:
    model = make_model(**SHAPE)
    given = f"{ON} policy.model_name={model} {CFG}={written(tmp_path / 'more.yaml', pattern)}"
    for words in (f"asks for quantization of {what}, not supported here: ", quantizer):
        refuses(given, CFG, words, f"{CFG}={written(tmp_path / 'less.yaml')}")


def test_a_pattern_that_turns_on_nothing_is_told(make_model: Callable[..., Path], tmp_path: Path) -> None:
    def told(*patterns: str) -> list[str]:
        path = written(tmp_path / "quant.yaml", *patterns)
        overrides = [f"policy.model_name={make_model(**SHAPE)}", *ON.split(), f"{CFG}={path}"]
        loaded = load_config(PROJECT_ROOT / "examples/configs/grpo_tiny.yaml", overrides)
        return [line for line in map(str, examine(loaded, run_here=False).warnings) if "turns on nothing" in line]

    (line,) = told("*self_atention*weight_quantizer")
    assert line.startswith(f"{CFG}: '*self_atention*weight_quantizer' turns on nothing")
    assert told() == told("*self_attention*weight_quantizer", "mtp.*weight_quantizer") == []


def test_what_is_wrong_with_a_file_is_a_sentence(refusals: Callable[[str], list[str]], tmp_path: Path) -> None:
    (line,) = refusals(f"{ON} {CFG}={tmp_path}")
    assert f"{tmp_path}: is a folder, and no plain file. ModelOpt's that are known" in line


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
